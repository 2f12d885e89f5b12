"""Everything that touches Ray, Ray Serve or HAProxy; no other room imports these.

`app` is the Serve deployment, `ingress` chooses and configures the proxy in front, `ray_environment` and
`ray_processes` manage Ray's own processes.
"""
