"""Several drivers that work one sweep together, through a folder that they share: its log, and what follows from it.

The drivers are the *members*. What a member has to tell, it appends to the log (:mod:`fluid.joint.log`); what follows
from the log is the same for each of them (:mod:`fluid.joint.state`), so none leads. A trial is run by the member that
has its *lease*. Each member writes nothing but files of its own; the whole folder:

log/00000000, ...   the log: a file for each entry, which is never changed
members/NAME/       what the member NAME writes: an ordinary run folder, and ``alive``, the sign that it runs
"""
