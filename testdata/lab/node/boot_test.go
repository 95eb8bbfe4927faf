package node

var bootCases = []testCase{}
