"""The HTTP API: routes, bodies of bounded size, event streams, disconnecting clients.

`client_connection` sends, `http_transport` reads and streams, `http_api` answers, `application` has the routes.
"""
