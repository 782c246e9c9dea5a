#!/bin/sh
# Creates the credentials of docker-compose.yml in the folder of each service, unless an earlier start has created them.
# Runs in popgate's image as root. Everything is random, and valid for one deployment.
set -eu
umask 077
cd "${1:-/credentials}"

if [ -e popgate/complete ]; then
  exit 0
fi
find popgate rabbitmq redis -mindepth 1 -delete # an earlier start may have been interrupted

rabbitmq_password=$(openssl rand -hex 32)
redis_password=$(openssl rand -hex 32)
erlang_cookie=$(openssl rand -hex 32)
redis_hash=$(printf %s "$redis_password" | sha256sum | cut -d ' ' -f 1)

printf %s "$erlang_cookie" >rabbitmq/erlang-cookie
echo "$rabbitmq_password" >rabbitmq/password

# Redis reads this file as a user of its own. Without a password, a client can only ping. popgate has the rights of
# docs/security.md, and reads Redis's settings, which contain no password here.
redis_rights="+auth +del +eval +evalsha +exists +get +hdel +hexists +hget +hgetall +hkeys +hlen +hmget \
+hscan +hset +hsetnx +hvals +incr +llen +lrange +ltrim +mget +ping +publish +rpush +sadd +select +set +setnx \
+smembers +srem +subscribe +time +unlink +unsubscribe +zadd +zcount +zrangebyscore +zrem +zremrangebyscore \
+zrevrange +zscore +config|get"
cat >redis/users.acl <<ACL
user default on nopass resetkeys resetchannels -@all +ping
user popgate on #$redis_hash resetkeys ~popgate:default:* resetchannels &popgate:default:* -@all $redis_rights
ACL
chmod 644 redis/users.acl

url() { echo "amqp://popgate:$rabbitmq_password@$1:5672/"; }
echo "$(url rabbitmq-1),$(url rabbitmq-2),$(url rabbitmq-3)" >popgate/amqp-url-1
echo "$(url rabbitmq-2),$(url rabbitmq-3),$(url rabbitmq-1)" >popgate/amqp-url-2
echo "redis://popgate:$redis_password@redis:6379/0" >popgate/redis-url

popgate secrets new popgate/secret
popgate keys add administrator --role administrator --file popgate/keys.toml >popgate/administrator-key

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 825 \
  -subj '/CN=popgate' -addext 'subjectAltName=DNS:localhost,IP:127.0.0.1,DNS:balancer,DNS:popgate-1,DNS:popgate-2' \
  -addext 'keyUsage=critical,digitalSignature,keyCertSign' -addext 'extendedKeyUsage=serverAuth' \
  -keyout popgate/tls.key -out popgate/tls.crt

chown -R 10001:10001 popgate
touch popgate/complete # the last step: a later start does nothing
