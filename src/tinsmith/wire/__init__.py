"""Bytes of the Tinker protocol <-> `tinsmith.types`, shared by server and engine. No I/O, SQL or web framework.

Readers raise UserError that names the field at fault; writers give the bytes exactly as the client gets them.
"""
