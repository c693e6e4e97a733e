"""Data that is loaded once per host and mapped by all its lanes: ``fluid.shared``.

The first lane that asks calls the loader and writes the result to one file: its pickle, and beside it the raw bytes of
its arrays, tensors and tables (pickle protocol 5 with out-of-band buffers). Every lane maps that file. The file is in a
folder of the lane's host, which deletes it with the session's other payloads, whatever ends the session.
"""
