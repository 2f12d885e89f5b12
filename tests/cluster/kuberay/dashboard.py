"""Sends one request to a Ray dashboard, and prints the status and the body of its answer.

A program of its own, because it runs in the operator's network namespace: `python dashboard.py METHOD URL TIMEOUT_S`,
with a line that has the token, and the body, on its standard input. Exit status: 0 if there was an answer.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main(method: str, url: str, timeout_s: str) -> int:
    token, _, body = sys.stdin.read().partition("\n")
    # As ray-operator/controllers/ray/utils/dashboardclient/dashboard_httpclient.go of KubeRay 1.6.2.
    headers = {"Content-Type": "application/json", "x-ray-authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, body.encode() or None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=float(timeout_s)) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    except OSError as error:
        print(error)
        return 1
    print(status)
    print(text.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
