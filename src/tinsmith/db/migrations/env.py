"""Alembic's entry: runs the migrations on the connection that `Database.migrate` passes.

Until the first release there is one revision, `0001_schema.py`, and it changes with `schema.py`. From the first release
on revisions accumulate and never change: a change of `schema.py` adds a revision `schema_NNNN` to `versions`, and every
released schema can be migrated to the newest.
"""

from alembic import context

from tinsmith.db.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
