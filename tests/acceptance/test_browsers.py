"""Another site's page in a real Chromium, which tries everything it can to empty and stop a queue of a local
popgate.
"""

import http.client
import json
import re
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import Server
from support.proxy import ProxyProcess

GROUP = "/v1/admin/topics/t/groups/default"
SECONDS = 30
"""Maximum seconds for a whole visit of the browser, which takes about two."""

ATTACK = """<!DOCTYPE html><iframe name="answer"></iframe><script>
const target = "%(target)s", group = target + "%(group)s", tried = {}
async function attempt(name, path, options) {
  try { tried[name] = (await fetch(path, options)).status } catch (error) { tried[name] = "blocked" }
}
function form(path, type) {
  const form = document.createElement("form")
  Object.assign(form, {action: path, method: "post", enctype: type, target: "answer"})
  document.body.append(form)
  return new Promise(done => { document.querySelector("iframe").onload = done; form.submit() })
}
const text = '{"messages":[{"body":"evil"}]}', messages = target + "/v1/topics/t/messages"
addEventListener("load", async () => {
  for (const verb of ["purge", "pause", "dead-letters/redrive"]) {
    await attempt(verb + " unseen", group + "/" + verb, {method: "POST", mode: "no-cors"})
    await attempt(verb + " named", group + "/" + verb, {method: "POST", headers: {"content-type": "application/json"}})
    for (const type of ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"])
      await form(group + "/" + verb, type)
  }
  await attempt("delete", group, {method: "DELETE"})
  await attempt("put", group, {method: "PUT", body: '{"paused":true}'})
  await attempt("publish text", messages, {method: "POST", mode: "no-cors", body: text})
  await attempt("publish blob", messages, {method: "POST", mode: "no-cors", body: new Blob([text])})
  navigator.sendBeacon(messages, text)
  await attempt("publish json", messages, {method: "POST", headers: {"content-type": "application/json"}, body: text})
  await attempt("read", target + "/v1/topics/t/groups/default")
  await fetch("/done", {method: "POST", body: JSON.stringify(tried)})
})
</script>"""


class Site(ThreadingHTTPServer):
    """Serves one page, records what the page reports, and passes other requests to ``popgate``, as if the site's
    name had been pointed there after the page was loaded.
    """

    daemon_threads = True

    def __init__(self, popgate: ProxyProcess) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.popgate = popgate
        self.page = ""
        self.told: dict[str, Any] = {}
        self.done = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Site  # pyright: ignore[reportIncompatibleVariableOverride]  # the server that makes it

    def do_GET(self) -> None:
        if self.path == "/page":
            self._answer(200, self.server.page.encode(), "text/html")
        else:
            self._pass_on()

    def do_POST(self) -> None:
        if self.path == "/done":
            self.server.told = json.loads(self._body())
            self._answer(200, b"", "text/plain")
            self.server.done.set()
        else:
            self._pass_on()

    do_DELETE = do_PUT = do_OPTIONS = do_POST  # noqa: N815  # as http.server has them

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", "0")))

    def _pass_on(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.popgate.port)
        connection.request(self.command, self.path, self._body(), dict(self.headers.items()))
        response = connection.getresponse()
        self._answer(response.status, response.read(), response.getheader("content-type", ""))
        connection.close()

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Browser(Server):
    """Chromium, as long as it is open."""

    stop_timeout_seconds = 10
    ready_timeout_seconds = SECONDS

    def __init__(self, program: str, folder: Path, url: str) -> None:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}/profile"]
        # Every name resolves to this machine, as with DNS rebinding. A debugging port keeps the browser open.
        rules = ["--host-resolver-rules=MAP * 127.0.0.1", "--remote-debugging-port=0", "--no-proxy-server"]
        super().__init__(
            "chromium", folder, arguments=[program, *flags, *rules, url], environment={"HOME": str(folder)}
        )

    def _answers(self) -> bool:
        return True


@pytest.fixture
def popgate(tmp_path: Path) -> Iterator[ProxyProcess]:
    """A proxy with one message in a topic, and one dead letter."""
    with ProxyProcess(tmp_path / "popgate") as process:
        publish = {"messages": [{"body": "dead"}, {"body": "good"}]}
        assert process.client.put("/v1/admin/topics/t", json={"queues": 1}).is_success
        assert process.client.put(GROUP).is_success
        assert process.client.post("/v1/topics/t/messages", json=publish).is_success
        (message,) = process.client.post("/v1/topics/t/groups/default/pop", json={"wait_seconds": 5}).json()["messages"]
        entry = {"entries": [{"receipt_handle": message["receipt_handle"]}]}
        assert process.client.post("/v1/topics/t/groups/default/reject", json=entry).is_success
        yield process


@contextmanager
def visited(chromium: str, folder: Path, popgate: ProxyProcess, host: str, target: str) -> Generator[dict[str, Any]]:
    """Load the page that attacks ``target`` from a site called ``host``; return what it reports. {port} stands for
    its port.
    """
    site = Site(popgate)
    port = site.server_address[1]
    site.page = ATTACK % {"target": target.format(port=port), "group": GROUP}
    serving = threading.Thread(target=site.serve_forever)
    serving.start()
    try:
        with Browser(chromium, folder / "browser", f"http://{host}:{port}/page") as browser:
            if not site.done.wait(SECONDS):
                raise browser.failure("did not finish the page")
        yield site.told
    finally:
        site.shutdown()
        site.server_close()
        serving.join()


def state(popgate: ProxyProcess) -> httpx.Response:
    return popgate.client.get("/v1/topics/t/groups/default")


def assert_untouched(popgate: ProxyProcess) -> None:
    now = state(popgate).json()
    assert (now["ready"], now["dead"], now["policy"]["paused"]) == (1, 1, False)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1"])  # another port of this machine is another origin, too
def test_another_sites_page_changes_nothing_and_reads_nothing(
    chromium: str, tmp_path: Path, popgate: ProxyProcess, host: str
) -> None:
    with visited(chromium, tmp_path, popgate, host, popgate.url) as told:
        assert_untouched(popgate)
    unseen = {name for name, status in told.items() if status == 0}  # sent, but the answer is hidden from the page
    assert unseen == {"purge unseen", "pause unseen", "dead-letters/redrive unseen", "publish text", "publish blob"}
    assert {status for name, status in told.items() if name not in unseen} == {"blocked"}
    refused = re.search(r'popgate_http_requests_total{operation="refused",status="415"} (\d+)', metrics(popgate))
    assert refused is not None
    assert int(refused[1]) >= 3 * 4 + 3  # they did reach the proxy


def test_a_page_whose_name_is_pointed_to_this_machine_changes_nothing_and_reads_nothing(
    chromium: str, tmp_path: Path, popgate: ProxyProcess
) -> None:
    with visited(chromium, tmp_path, popgate, "evil.example", "http://evil.example:{port}") as told:
        assert_untouched(popgate)
    assert set(told.values()) == {403}


def test_a_page_of_the_proxys_own_does_what_it_is_asked_to(
    chromium: str, tmp_path: Path, popgate: ProxyProcess
) -> None:
    """The same page as if from popgate itself: the refusals above are due to the origin."""
    with visited(chromium, tmp_path, popgate, "127.0.0.1", "http://127.0.0.1:{port}") as told:
        assert state(popgate).json()["dead"] == 0
    assert (told["purge unseen"], told["pause unseen"], told["delete"], told["publish text"]) == (200, 200, 204, 200)


def metrics(popgate: ProxyProcess) -> str:
    return popgate.client.get("/metrics").text
