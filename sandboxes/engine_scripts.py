"""What the shell and its tools do in a box whose image holds no Python, as the agent's user.

Each script gets its paths as arguments, absolute and without surprises; what went wrong is read from the tools' words.
"""

import errno
import os
import posixpath

from driftgym.sandboxes.base import WORK_DIR

READ_SCRIPT = """
[ -f "$1" ] || { [ -e "$1" ] && echo "Not a regular file" >&2 || echo "No such file or directory" >&2; exit 66; }
exec head -c "$2" "$1"
"""
WRITE_SCRIPT = """
mkdir -p "$2" || exit 1
[ ! -e "$1" ] || [ -f "$1" ] || { echo "Invalid argument" >&2; exit 1; }
exec cat >"$1"
"""
UPLOAD_SCRIPT = """
mkdir -p "$1" && cd "$1" || exit 1
export EXTRACT_UNSAFE_SYMLINKS=1
exec tar -xopf -
"""
MODES_SCRIPT = """
cd "$1" || exit 1
shift
while [ $# -gt 1 ]; do chmod "$1" "./$2" || exit 1; shift 2; done
"""
DOWNLOAD_SCRIPT = """
cd "$1" && [ -r . ] || exit 66
exec tar -cf - .
"""
CANNOT_READ = 66
"""The exit code for what is not there, or not for the agent's user."""

CLEAN_SCRIPT = r"""
# `rm` and `find` of some boxes take whole paths and a file descriptor a level, which the kernel bounds: what lies
# deeper is brought up. Folders may be locked.
# No list of names is a word of the shell: they may be many, and hold anything.
is_empty() { [ -z "$(find "$1" -mindepth 1 -maxdepth 1 -exec echo x {} + 2>&1)" ]; }
empty() {
  cd "$1" || return 1
  round=0
  until is_empty .; do
    find . -mindepth 1 -maxdepth 1 ! -type l -exec chmod -R u+rwx {} + 2>/dev/null
    find . -mindepth 1 -maxdepth 1 -exec rm -rf {} + 2>/dev/null
    is_empty . && return 0
    round=$((round+1))
    [ $round -gt 500 ] && return 1
    for depth in 100 12; do
      find . -mindepth $depth -maxdepth $depth -type d -exec sh -c '
        round=$1; shift
        for folder; do count=$((count+1)); mv "$folder" "./up.$round.$$.$count"; done' sh $round.$depth {} + 2>/dev/null
      [ -z "$(find . -maxdepth 1 -name "up.$round.*")" ] || break
    done
  done
}
for folder; do
  [ -d "$folder" ] || continue
  empty "$folder" || { echo "$folder is not empty" >&2; exit 1; }
done
for folder; do
  [ -d "$folder" ] || continue
  is_empty "$folder" || { echo "$folder is not empty" >&2; exit 1; }
done
for table in /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg; do
  [ -r $table ] || continue
  { read -r heading; read -r object; } <$table && { echo "objects are left in $table" >&2; exit 1; }
done
exit 0
"""

_NUMBERS = {os.strerror(number).lower(): number for number in sorted(errno.errorcode, reverse=True)}
_NUMBERS["directory nonexistent"] = errno.ENOENT
_NUMBERS["file too large"] = errno.EFBIG
_NO_TOOL_CODES = (126, 127)


def shell_argv(script: str, *arguments: str) -> list[str]:
    """The argv that runs a script with its arguments."""
    return ["/bin/sh", "-c", script, "sh", *arguments]


def has_no_tool(exit_code: int | None) -> bool:
    """True when a script ended because the image lacks what it calls."""
    return exit_code in _NO_TOOL_CODES


def absolute_path(path: str) -> str:
    """`path` in the box; relative ones start in the work folder.

    Raises:
        OSError: it cannot be a path (a null byte, half a character, too long).
    """
    try:
        name = path.encode()
    except UnicodeEncodeError:
        raise OSError(errno.EINVAL, "Invalid path", path) from None
    if b"\0" in name:
        raise OSError(errno.EINVAL, "Invalid path", path)
    if len(name) > os.pathconf("/", "PC_PATH_MAX"):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    return posixpath.join(WORK_DIR, path)


def error_of(words: str, path: str) -> OSError:
    """What a tool complained of, as the error that it is; EIO when its words are not known.

    >>> error_of("sh: can't create /x: Read-only file system", "/x").errno == errno.EROFS
    True
    """
    lines = [line for line in words.strip().splitlines() if line.strip()] or ["no reason given"]
    for line in lines:
        reason = line.rpartition(": ")[2].strip().lower()
        if reason in _NUMBERS:
            return OSError(_NUMBERS[reason], os.strerror(_NUMBERS[reason]), path)
    return OSError(errno.EIO, lines[-1][:300], path)
