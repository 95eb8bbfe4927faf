package node

var generatorCases = []testCase{}
