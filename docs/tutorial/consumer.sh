#!/bin/sh
# Processes orders with nothing but curl: writes the SHA-256 of every body to processed-NAME.txt.
#
#     sh consumer.sh NAME
#
# One message at a time, to stay short. Ends with Ctrl-C or SIGTERM; what it has in hand then comes again for others.
set -eu
name=$1
group=${POPGATE_URL:-http://127.0.0.1:8080}/v1/topics/orders/groups/billing
answer=$(mktemp)
trap 'rm -f "$answer"' EXIT
trap 'exit 0' INT TERM
export LC_ALL=C # sed works on bytes

# JSON's escapes, written as printf's: \" and \\ here, so that every " left begins or ends a string; \u00.. below.
split() { sed -e 's/\\\\/\\0134/g' -e 's/\\"/\\0042/g' | tr '"' '\n'; }
controls=$(i=0; while [ $i -lt 128 ]; do printf 's/\\\\u%04x/\\\\0%03o/g;' $i $i; i=$((i + 1)); done)

# The first value of a field in the answer: the line after the one after its name.
field() { sed -n "/^$1\$/ { n; n; p; q; }" "$answer"; }
number() { sed -n "/^$1\$/ { n; /^:[0-9]/ { s/[^0-9]//g; p; q; }; }" "$answer"; }
body() {
  if grep -q '^body_base64$' "$answer"; then
    field body_base64 | base64 -d
  else
    printf %b "$(field body | sed "$controls")"
  fi
}

while :; do
  if ! curl -sS -f "$group/pop" -d '{"wait_seconds":10,"invisibility_seconds":60}' | split >"$answer"; then
    sleep 1
    continue
  fi
  receipt_handle=$(field receipt_handle)
  [ -n "$receipt_handle" ] || continue
  checksum=$(body | sha256sum | cut -d ' ' -f 1)
  echo "$checksum $(number delivery_count) $(number queue) $(date +%s.%N)" >>"processed-$name.txt"
  curl -sS -f -o /dev/null "$group/ack" -d "{\"receipt_handles\":[\"$receipt_handle\"]}"
done
