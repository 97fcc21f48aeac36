"""Bytes of the Tinker protocol <-> `tinsmith.types`, shared by server and engine. No I/O, SQL or web framework.

Readers raise a UserError that names the wrong field; writers return the bytes that the client receives.
"""
