"""Alembic's entry point: runs the migrations on the connection that `Database.migrate` passes.

Revisions never change: a change of `schema.py` adds a revision `schema_NNNN` to `versions`, so that every earlier
schema can be migrated to the newest.
"""

from alembic import context

from tinsmith.db.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
