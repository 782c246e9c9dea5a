"""Defines the text that a proxy prints after its start: its address, and three commands to paste. A proxy
that requires keys shows how to make one instead."""

from popgate import __version__
from popgate.config import ServeOptions


def banner(options: ServeOptions) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"{'https' if options.has_tls else 'http'}://{host}:{options.port}"
    topic, group = f"{url}/v1/topics/hello", f"{url}/v1/topics/hello/groups/default"
    broker = "RabbitMQ" if options.amqp_urls else "the embedded broker"
    workers = "" if options.workers == 1 else f" with {options.workers} workers"
    lines = [
        f"popgate {__version__} on {broker}{workers}: {url}",
        f"data folder: {options.data_dir}",
        "",
    ]
    if options.has_authentication:
        return "\n".join(
            [*lines, "Clients need a key or a token: popgate keys --help", "", f"console: {url}/console   stop: Ctrl-C"]
        )
    lines.append("Publish, pop and ack a message:")
    if not options.auto_create:
        lines += [
            f"  curl -X PUT {url}/v1/admin/topics/hello -d '{{\"queues\":4}}'",
            f"  curl -X PUT {url}/v1/admin/topics/hello/groups/default",
        ]
    pick = 'sed -n \'s/.*"receipt_handle":"\\([^"]*\\)".*/\\1/p\''
    lines += [
        f'  curl {topic}/messages -d \'{{"messages":[{{"body":"hello"}}]}}\'',
        f"  handle=$(curl -s {group}/pop -d '{{}}' | tee /dev/stderr | {pick})",
        f'  curl {group}/ack -d "{{\\"receipt_handles\\":[\\"$handle\\"]}}"',
        "",
        f"console: {url}/console   API: {url}/docs   stop: Ctrl-C",
    ]
    return "\n".join(lines)
