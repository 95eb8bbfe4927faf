package goalstate

import "strings"

// closest returns the candidate that word is most likely meant to be, or nothing.
func closest(word string, candidates []string) string {
	// Of a short word little is left once two letters are wrong, and of "a" nothing.
	best, least := "", min(3, 1+len(word)/3)
	for _, c := range candidates {
		if fold(c) == fold(word) {
			return c
		}
		if gap := len(word) - len(c); gap >= least || -gap >= least {
			continue // at least as many letters to insert or delete
		}
		if d := distance(word, c); d < least {
			best, least = c, d
		}
	}
	return best
}

// fold removes what people mix up when they write a name from memory: nodeIP, node-ip and node_ip are the same.
func fold(s string) string {
	return strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(s))
}

// distance counts the letters to insert, delete, replace or swap with their neighbour (Damerau, Levenshtein).
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
