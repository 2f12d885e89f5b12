"""A Hub of model folders, in a network namespace: `python -m tests.cluster.hub ADDRESS CONTENT_ADDRESS NAME=FOLDER …`.

It listens on port 443, the only one that pods which fetch may reach, with HTTP. Large files are at the second address,
as the Hub's are. Prints a line of JSON with the commit of each repository, and serves until it is ended.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Final

from tests.command_line.fetch.hub_server import HubServer

PORT: Final = 443


def main(address: str, content_address: str, *repositories: str) -> None:
    server = HubServer((address, PORT), (content_address, PORT))
    commits = {}
    for name, _, folder in (each.partition("=") for each in repositories):
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        commits[name] = server.add(name, files).refs["main"]
    with server.host.running(), server.running():
        print(json.dumps(commits), flush=True)
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there are threads
    main(*sys.argv[1:])
