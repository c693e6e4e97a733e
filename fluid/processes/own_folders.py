"""Whether a folder with a name that others can guess is this user's: others may have made it before, or a link."""

from __future__ import annotations

import os
import stat
import tempfile


def require_own(folder: str) -> None:
    """Refuses a folder that another user has made, or may write to.

    Raises:
        PermissionError: it is not a folder of this user alone.
        OSError: there is none.
    """
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder of this user alone")


def temporary_folder(name: str) -> str:
    """Makes a folder of that name for temporary files, the same for all processes of this user that ask.

    If another user has taken the name, it is a new one, of another name.

    Raises:
        OSError: none can be made.
    """
    folder = os.path.join(tempfile.gettempdir(), name)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        require_own(folder)
    except OSError:
        return tempfile.mkdtemp(prefix=f"{name}-")
    return folder


def is_file_of_user(path: str) -> bool:
    """Whether there is a file that this user has made, here or on another machine that shares the disk.

    A file server may take the user for another one, as it does with root; then what is made there now is that one's.
    """
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return False
        if found.st_uid == os.getuid():
            return True
        with tempfile.TemporaryFile(dir=os.path.dirname(path)) as made:
            return os.fstat(made.fileno()).st_uid == found.st_uid
    except OSError:
        return False
