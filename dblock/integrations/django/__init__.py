"""Django: a `migrate` that every replica may start at once.

Add the app in front of those that bring a `migrate` of their own:

    INSTALLED_APPS = ["dblock.integrations.django", …]

`manage.py migrate` and `call_command("migrate")` then take a turn: one replica migrates, and the others wait and find
nothing to do. The lock is in the database that is migrated, and there is one for each schema. Settings, all optional:

    DBLOCK_MIGRATE = {"ttl": 15, "timeout": None, "attempts": 1, "lock_timeout": 5, "retries": 10, "schema": "dblock",
                      "name": None, "dsn": None, "listen_dsn": None, "fence": None, "drop_invalid": True,
                      "enabled": True}

Guarantee: while migrations run, this process holds the lock, and every transaction of the connection proves it first. A
transaction without the lease does not commit. A statement outside transactions is covered by the mark of its session:
the next holder ends that session before it begins.

Without migrations to apply, and with `--plan`, `--check` or `showmigrations`, nothing waits and no lock is taken. Test
databases are exempt.
"""
