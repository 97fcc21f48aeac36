"""Bytes of the Tinker protocol <-> `tinsmith.types`, shared by server and engine. No SQL or web framework, and no I/O,
except that `adapter_files` reads the files of an adapter.

Readers raise a UserError that names the wrong field; writers return the bytes that the client receives.
"""
