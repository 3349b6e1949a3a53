"""Generate lisa/outbox/sql/*.sql, the tables of outbox and inbox: `python docs/generate_sql.py`."""

from lisa.outbox.migrations import DIALECTS, FILES, sql

if __name__ == "__main__":
    for dialect in DIALECTS:
        (FILES / f"{dialect}.sql").write_text(sql(dialect), encoding="utf-8")
