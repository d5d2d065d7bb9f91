# Completion of iserblk for fish. Made by scripts/manpages from the commands: change those.

function __iserblk_lists
    command sh -c '@LISTS@' sh $argv 2>/dev/null </dev/null
end

# The command that stands on the line.
function __iserblk_command
    set -l words (commandline -opc)
    for word in $words[2..-1]
        if not string match -q -- '-*' $word
            echo $word
            return 0
        end
    end
    return 1
end

function __iserblk_in
    contains -- (__iserblk_command; or echo .) $argv
end

function __iserblk_url
    set -l word (commandline -ct)
    if string match -qr '^(iser|iscsi)://[^/@?]+/[^/?]*$' -- $word
        set -l portal (string replace -r '/[^/]*$' '' -- $word)
        # The portal is asked once in a minute. (An address with user@ is not: that would need a
        # secret.)
        set -l now (date +%s)
        if test "$portal" != "$__iserblk_asked"; or test $now -gt "$__iserblk_until"
            set -l words (commandline -opc)
            set -g __iserblk_known (__iserblk_lists target $words[1] $portal)
            set -g __iserblk_asked $portal
            set -g __iserblk_until (math $now + 60)
        end
        for target in $__iserblk_known
            echo $portal/$target
        end
    else if not string match -q '*://*' -- $word
        __iserblk_lists name
        printf '%s\n' iser:// iscsi://
    end
end

# A list of -o: what is behind its last comma.
function __iserblk_pairs
    set -l word (commandline -ct)
    set -l head (string match -r '^.*,' -- $word)
    for each in $argv @PAIRS@
        echo "$head$each"
    end
end

complete -c iserblk -f
@LINES@
