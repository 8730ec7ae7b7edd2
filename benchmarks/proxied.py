"""The percentiles of ``bei bench`` against those of an independent clock: nginx, through which all its requests go.

    python -m benchmarks.proxied --nginx nginx --peer PYTHON [--runs 3] [--seconds 30] [--pages FOLDER]

``--peer``: a Python that has infinity-emb, which serves the same MiniLM beside bei. Both are measured in one run of
``bei bench``, a closed loop each. nginx writes down each request's time, from its first byte read to the last byte of
its answer sent, in whole milliseconds; so requests are large enough to take hundreds. There is no warm-up within a run,
so that ``bei bench`` counts every request but its first, which asks whether the server answers at all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bei.cli.bench.result import PointResult, read_result
from benchmarks.common import with_foreign_load, write
from benchmarks.models import built, minilm_folder
from benchmarks.server import ROOT, environment, free_port, serving, tied, wait_ready

_MODEL = "minilm"
_CONCURRENCY = 8
_INPUTS, _WORDS = 8, 40
_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
_WARM_S = 5.0
_STOP_S = 30.0

_NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
  log_format times '$request_time $status $request_method';
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  client_max_body_size 64m; client_body_buffer_size 1m; proxy_buffers 64 64k;
  keepalive_requests 1000000; proxy_read_timeout 600s; proxy_http_version 1.1; proxy_set_header Connection "";
  {servers}
}}
"""
_NGINX_SERVER = """
  upstream {name} {{ server 127.0.0.1:{behind}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    access_log {folder}/nginx-{name}.log times;
    location / {{ proxy_pass http://{name}; }}
  }}
"""


def main() -> None:
    """Measure, and write ``results/proxied.json``."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        artifact = built(minilm_folder(), folder, 256, _MODEL)
        ports = {"bei": stack.enter_context(serving(artifact.path, home=folder / "home")).port}
        if options.peer is not None:
            ports["infinity"] = stack.enter_context(_infinity(options.peer, folder / "infinity.log"))
        _bench(ports, folder / "warm", _WARM_S, seed=0)
        proxy = Proxy(options.nginx, ports, folder)
        stack.callback(proxy.close)
        runs = []
        for number in range(1, options.runs + 1):
            out = (options.pages or folder) / f"proxied-{number}"
            run, foreign = with_foreign_load(partial(_run, proxy, out, options.seconds, seed=number))
            runs.append({**run, "foreign_load": foreign})
    worst = max(
        abs(figures["difference"]) for run in runs for server in ports for figures in run[server]["latency_ms"].values()
    )
    about = {"concurrency": _CONCURRENCY, "texts of a request": _INPUTS, "words of a text": _WORDS}
    write("proxied", {**about, "seconds": options.seconds, "largest difference": worst, "runs": runs})


class Proxy:
    """nginx before servers: ``ports`` are its own, by the servers' names."""

    def __init__(self, command: str, behind: Mapping[str, int], folder: Path) -> None:
        self._folder = folder
        self.ports = {name: free_port() for name in behind}
        servers = [
            _NGINX_SERVER.format(name=name, behind=port, port=self.ports[name], folder=folder)
            for name, port in behind.items()
        ]
        file = folder / "nginx.conf"
        file.write_text(_NGINX.format(folder=folder, servers="".join(servers)))
        self._process = subprocess.Popen(tied([command, "-p", folder, "-c", file, "-e", folder / "nginx-errors.log"]))
        self._num_read = dict.fromkeys(behind, 0)

    def requests_s(self, name: str) -> list[float]:
        """Seconds of each POST to a server since the last call, in the order in which they ended.

        Ends the program where one was not answered with 200.
        """
        time.sleep(0.5)  # the last line is written when the answer has been sent
        lines = (self._folder / f"nginx-{name}.log").read_text().splitlines()
        fresh, self._num_read[name] = lines[self._num_read[name] :], len(lines)
        rows = [line.split() for line in fresh if line.endswith(" POST")]
        if any(status != "200" for _, status, _ in rows):
            raise SystemExit(f"not every request to {name} was answered with 200")
        return [float(seconds) for seconds, _, _ in rows]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(_STOP_S)


def _run(proxy: Proxy, out: Path, seconds: float, *, seed: int) -> dict[str, Any]:
    """One run of ``bei bench`` through ``proxy``: its figures, by server, and the proxy's."""
    points = _bench(proxy.ports, out, seconds, seed=seed)
    found = {name: _compared(point, proxy.requests_s(name)) for name, point in points.items()}
    for name, figures in found.items():
        rows = (f"{key} {row['bench']:,.1f} ({row['difference']:+.1%})" for key, row in figures["latency_ms"].items())
        print(f"run {seed}, {name}, {figures['requests']} requests: {', '.join(rows)}", flush=True)
    return found


def _bench(ports: Mapping[str, int], out: Path, seconds: float, *, seed: int) -> dict[str, PointResult]:
    urls = [f"{name}=http://127.0.0.1:{port}" for name, port in ports.items()]
    flags = {
        "model": _MODEL,
        "concurrency": _CONCURRENCY,
        "inputs": _INPUTS,
        "words": _WORDS,
        "warmup": 0,
        "duration": seconds,
        "seed": seed,
        "out": out,
    }
    command = [sys.executable, "-m", "bei", "bench", *urls, *(f"--{name}={value}" for name, value in flags.items())]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(ROOT, None, {}), stdout=subprocess.DEVNULL)
    return {point.server: point for point in read_result(Path(f"{out}.json")).points}


def _compared(point: PointResult, proxied_s: list[float]) -> dict[str, Any]:
    """Figures of one server. ``difference``: how far those of ``bei bench`` are above the proxy's."""
    (load,) = point.loads
    counted_s = proxied_s[1:]  # the first asks whether the server answers at all
    if load.failures or load.latency.count != len(counted_s):
        raise SystemExit(f"bei bench counted {load.latency.count} requests, the proxy {len(counted_s)}")
    figures = {}
    for name, percent in _PERCENTILES.items():
        bench = getattr(load.latency, name)
        proxy = 1e3 * float(np.percentile(counted_s, percent, method="inverted_cdf"))
        if bench is not None:  # enough requests for this percentile
            figures[name] = {"bench": bench, "proxy": round(proxy, 1), "difference": round(bench / proxy - 1, 4)}
    shares = {"workers": point.cpu_shares, "coordinator": point.coordinator_share}
    return {"requests": len(counted_s), "latency_ms": figures, "bei bench, shares of a core": shares}


@contextmanager
def _infinity(python: Path, log: Path) -> Iterator[int]:
    """infinity-emb with MiniLM on PyTorch, ready; its port."""
    port = free_port()
    flags = {
        "model-id": minilm_folder(),
        "served-model-name": _MODEL,
        "host": "127.0.0.1",
        "port": port,
        "url-prefix": "/v1",
        "engine": "torch",
        "device": "cpu",
    }
    command = [python.with_name("infinity_emb"), "v2", *(f"--{name}={value}" for name, value in flags.items())]
    variables = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "INFINITY_BETTERTRANSFORMER": "false"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            tied(command),
            stdout=file,
            stderr=file,
            env={**environment(ROOT, None, variables), "PYTHONPATH": ""},
        )
        try:
            wait_ready(port, process, path="/health")
            yield port
        except TimeoutError as error:
            raise SystemExit(f"infinity-emb: {error}:\n{log.read_text()[-2000:]}") from None
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nginx", default="nginx", help="the program")
    parser.add_argument("--peer", type=Path, help="a Python that has infinity-emb; without it bei alone is measured")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each server in each run")
    parser.add_argument("--pages", type=Path, help="a folder to keep the results and pages of bei bench in")
    return parser


if __name__ == "__main__":
    main()
