# fish completion for berth(8), which says itself what may come next.
function __berth_complete
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    # After "--" berth would take the question for an argument, and run the command.
    contains -- -- $words; and return
    set -l word (commandline --current-token --cut-at-cursor)
    test "$word" = --; and set word - # which is answered, other than "--"
    string match --quiet -- '-*' $word; and set -a words $word
    $words --generate-bash-completion 2>/dev/null
end
complete --command berth --arguments '(__berth_complete)'
