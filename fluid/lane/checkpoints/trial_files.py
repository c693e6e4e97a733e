"""What a trial's code has written to its own folder, copied for a trial that starts from its state."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress

from fluid._private_files import make_folder
from fluid.lane.checkpoints.paths import own_folder, own_folder_beside


def copy_trial_files(run_folder: str, parent: str, child: str, checkpoint: str = "") -> None:
    """Copies the own folder of a trial, the parent, as that of another one, the child, which has not run yet.

    Symbolic links stay links; those to something in the folder then point to the copy. Sockets, pipes and devices are
    left out, and files that go meanwhile. The copy appears as a whole, in place of an earlier one.

    Args:
        run_folder: the run's.
        parent: the parent.
        child: the child.
        checkpoint: of the parent's, if it is of another run: a folder beside it is its own.

    Raises:
        OSError: something cannot be read, or the disk is full; the child has no folder then.
    """
    source = own_folder_beside(checkpoint) if checkpoint else own_folder(run_folder, parent)
    target = own_folder(run_folder, child)
    if source is None or not os.path.isdir(source):
        return
    above = os.path.dirname(target)
    make_folder(above)
    draft = tempfile.mkdtemp(prefix=".files.", dir=above)
    try:
        _copy_within(source, draft, os.path.abspath(source), os.path.abspath(target))
        shutil.rmtree(target, ignore_errors=True)
        os.rename(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _copy_within(source: str, target: str, root: str, new_root: str) -> None:
    with os.scandir(source) as entries:
        found = list(entries)
    for entry in found:
        path, copy = entry.path, os.path.join(target, entry.name)
        with suppress(FileNotFoundError):  # A thread of the parent's has just deleted it.
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                os.symlink(_moved(os.readlink(path), root, new_root), copy)
            elif stat.S_ISREG(mode):
                shutil.copy2(path, copy)
            elif stat.S_ISDIR(mode):
                os.mkdir(copy, 0o700)
                _copy_within(path, copy, root, new_root)
                shutil.copystat(path, copy, follow_symlinks=False)


def _moved(link: str, root: str, new_root: str) -> str:
    """What a link to something within a folder points to in its copy."""
    if link == root or link.startswith(os.path.join(root, "")):
        return new_root + link[len(root) :]
    return link
