package node

var machineCases = []testCase{}
