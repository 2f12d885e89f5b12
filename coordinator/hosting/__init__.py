"""Who runs replicas: Ray Serve with a proxy in front, or a process by itself. No other room imports Ray or HAProxy.

`replica` is what both host. With Ray, `ray_serve` starts everything, `app` is the Serve deployment, `ingress` chooses
and configures the proxy, `ray_environment` and `ray_processes` manage Ray's own processes. Without Ray,
`plain_process` serves one replica, over HTTP by `http_server`; neither imports Ray.
"""
