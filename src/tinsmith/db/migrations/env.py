"""Alembic's entry: runs the migrations on the connection that `Database.migrate` passes."""

from alembic import context

from tinsmith.db.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
