"""Other people's clients, unmodified, against a live server: `python -m tests.clients` (`make test-clients`).

In reading order: `catalogue` reads what each folder's `client.toml` declares, `environments` installs the pinned
packages, `runs` runs the programs, `page` writes the table of the documentation. A client's folder has its
declaration, the lock of its packages and the program; `checks/` is what the programs share.
"""
