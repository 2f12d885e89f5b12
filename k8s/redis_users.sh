#!/bin/sh
# Creates Redis' users with new passwords: coordinators, which may read and write everything, and target and draft workers,
# which may use only the leases of their own pool, by the commands that keep one. So a compromised worker cannot read prompts
# in Redis, nor stop it: it may run no script, which could run for ever, and no command that goes through all keys or waits.
#
#   k8s/redis_users.sh FOLDER [ADDRESS]
#
# writes FOLDER/users.conf for Redis, with hashes alone, and FOLDER/url-coordinator, url-target and url-draft, for
# --redis-url-file. ADDRESS is rediss://redis:6379, with the certificates of the component `mtls`, unless given;
# redis://HOST:PORT is not encrypted.
set -eu
umask 077
folder=${1:?k8s/redis_users.sh FOLDER [ADDRESS]}
address=${2:-rediss://redis:6379}
certificates=
case $address in
rediss://*)
  tls=/etc/outrider/tls
  certificates="?ssl_certfile=$tls/tls.crt&ssl_keyfile=$tls/tls.key&ssl_ca_certs=$tls/ca.crt"
  ;;
redis://*) ;;
*) echo "redis_users.sh: $address is neither redis://HOST:PORT nor rediss://HOST:PORT" >&2; exit 2 ;;
esac
mkdir -p "$folder"

user() { # NAME COMMANDS-AND-KEYS
  password=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  hash=$(printf %s "$password" | sha256sum | cut -c1-64)
  echo "user $1 on #$hash resetchannels $2"
  echo "${address%%://*}://$1:$password@${address#*://}/0$certificates" >"$folder/url-$1"
}

# Those of outrider/registry/own_lease.py.
lease="-@all +ping +select +time +watch +unwatch +multi +exec +discard +hget +hmget +hset +del +pexpire +zadd +zincrby +zrem +xadd"
{
  echo "user default off"
  user coordinator "+@all -@admin -@dangerous ~*"
  user target "$lease ~{or:target}:*"
  user draft "$lease ~{or:draft}:*"
} >"$folder/users.conf"
