"""The database: connections, transactions, named statements, tables, migrations and wake-ups."""
