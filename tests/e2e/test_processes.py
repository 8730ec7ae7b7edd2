"""One server in several processes, under load: whoever dies is replaced, and what is accepted is answered once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bei.artifact.manifest import Artifact
from bei.config.devices import usable_cores
from tests.e2e.children import (
    check_error,
    children,
    left_behind,
    state,
    stopped,
    vectors_of,
    wait_until_well,
    with_own_tmp,
)
from tests.e2e.load import READY_AGAIN_S, Load
from tests.e2e.process import DEADLINE_S, Server, run, serve, wait_until
from tests.e2e.standin_child import CRASHES_ONCE, HANGS_ONCE, HOLDS, KILLS
from tests.e2e.swapping_server import PLACE, put_in_place, save_build, vector_of

StartServer = Callable[..., Server]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of ``many``, with build 1 in ``tiny``."""
    folder = tmp_path_factory.mktemp("many")
    save_build(folder / "tiny", 1)
    return folder


@pytest.fixture(scope="module")
def many(folder: Path, env: Mapping[str, str]) -> Iterator[Server]:
    """A server of two front ends. At its end nothing of it is left."""
    command = [sys.executable, "-m", "tests.e2e.processes_server", folder / "tiny", *("--http-workers", "2")]
    with Server([*command, *("--hang-timeout", "3")], with_own_tmp(env, folder), folder) as server:
        yield server
        processes = children(server)
        assert {*processes} == {"front-0", "front-1", "engine-0"}
        assert stopped(server) == 0
        assert server.log[-1].endswith("supervisor: stopped")
        assert not any(process.is_running() for process in processes.values())
    assert left_behind(folder) == []
    assert not any("Traceback" in line for line in server.log), "\n".join(server.log)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, env: Mapping[str, str]) -> Iterator[Server]:
    """A server of two devices, if there are two cores. At its end nothing of it is left."""
    cores = usable_cores()
    if len(cores) < 2:
        pytest.skip("there is one core")
    folder = tmp_path_factory.mktemp("spread")
    save_build(folder / "tiny", 1)
    command = [sys.executable, "-m", "tests.e2e.processes_server", folder / "tiny", "--hang-timeout", "3"]
    with Server([*command, "--devices", f"{cores[0]},{cores[1]}"], with_own_tmp(env, folder), folder) as server:
        yield server
        processes = children(server)
        assert {*processes} == {"front-0", "manager", "engine-0", "engine-1"}
        assert stopped(server) == 0
        assert not any(process.is_running() for process in processes.values())
    assert left_behind(folder) == []
    assert not any("Traceback" in line for line in server.log), "\n".join(server.log)


@pytest.fixture
def start(tmp_path: Path, env: Mapping[str, str]) -> Iterator[StartServer]:
    """``start(*flags, **variables)``: a server of build 1, in ``tmp_path``."""
    save_build(tmp_path / "tiny", 1)
    env = with_own_tmp(env, tmp_path)
    with ExitStack() as stack:

        def start(*flags: object, **variables: str) -> Server:
            command = [sys.executable, "-m", "tests.e2e.processes_server", tmp_path / "tiny", *flags]
            return stack.enter_context(Server(command, {**env, **variables}, tmp_path))

        yield start


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as pool:
        yield pool


def test_what_a_user_asks_for_is_there_whichever_front_end_answers(many: Server) -> None:
    assert state(many) == (200, 200)
    for _ in range(8):  # a connection each
        assert vectors_of(many.embed([[1, 2], [3]])) == [vector_of([1, 2], 1), vector_of([3], 1)]
        info = httpx.get(f"{many.url}/info", timeout=DEADLINE_S).json()
        assert (info["http_workers"], info["devices"]) == (2, [])
    created = {httpx.get(f"{many.url}/v1/models", timeout=DEADLINE_S).text for _ in range(8)}
    assert len(created) == 1
    assert sum("listening on" in line for line in many.log) == 1


@pytest.mark.parametrize(
    ("devices", "name", "number"),
    [
        ("many", "engine-0", signal.SIGKILL),
        ("many", "engine-0", signal.SIGSEGV),
        ("many", "front-1", signal.SIGKILL),
        ("spread", "engine-1", signal.SIGSEGV),
        ("spread", "manager", signal.SIGKILL),
    ],
)
def test_a_process_that_dies_under_load_is_replaced_and_costs_nobody_an_answer(
    devices: str, name: str, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(devices)
    before = children(server)
    with Load(server, may_break=name.startswith("front")) as load:
        killed_s = time.monotonic()
        before[name].send_signal(number)
        if number == signal.SIGSEGV:
            server.wait_for_log("Fatal Python error: Segmentation fault")  # and the stacks of its threads
        server.wait_for_log(f"ERROR supervisor: {name} was ended by {number.name}: another one is started")
        server.wait_for_log(f"{name} is ready again")
        load.wait_for_more()
        assert time.monotonic() - killed_s < READY_AGAIN_S
    assert load.errors == []
    if name.startswith("front"):
        broken = [client.num_broken for client in load.clients]
        assert max(broken) <= 1  # the request under way on a connection of the dead front end, and no other
    after = children(server)
    assert {other for other in before if before[other].pid != after[other].pid} == {name}
    wait_until_well(server)
    wait_until(lambda: server.metric("bei_queue_sequences") == 0, "nothing waits")


@pytest.mark.parametrize("devices", ["many", pytest.param("spread", marks=pytest.mark.slow)])
def test_sequences_that_kill_engines_are_errors_and_their_neighbours_are_answered(
    devices: str, clients: ThreadPoolExecutor, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(devices)
    with Load(server) as load:
        answers = [clients.submit(server.embed, [[7, number]]) for number in range(5)]
        guilty = [clients.submit(server.embed, [[value, KILLS]]) for value in range(2)]
        for answer in guilty:
            check_error(answer.result(DEADLINE_S), 500, "engine_died")
        assert [vectors_of(answer.result(DEADLINE_S)) for answer in answers] == [
            [vector_of([7, v], 1)] for v in range(5)
        ]
        assert vectors_of(server.embed([[CRASHES_ONCE], [1]])) == [vector_of([CRASHES_ONCE], 1), vector_of([1], 1)]
        load.wait_for_more()
    assert load.errors == []
    wait_until_well(server)


@pytest.mark.parametrize("devices", ["many", pytest.param("spread", marks=pytest.mark.slow)])
def test_a_step_that_hangs_ends_with_its_process_and_is_run_again(devices: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(devices)
    assert vectors_of(server.embed([[HANGS_ONCE], [1]])) == [vector_of([HANGS_ONCE], 1), vector_of([1], 1)]
    server.wait_for_log("a step of engine-[01] does not end: the process is ended")
    server.wait_for_log("engine-[01] is ready again")


def test_a_front_end_whose_tokenizer_dies_is_replaced(many: Server, clients: ThreadPoolExecutor) -> None:
    dying = clients.submit(many.embed, ["die", "die"])
    many.wait_for_log("a tokenizer thread of tiny has died: it is replaced")
    many.wait_for_log("front-. is ready again")
    check_error(dying.result(DEADLINE_S), 503, "shutting_down")
    wait_until_well(many)
    assert len(vectors_of(many.embed(["hello", "world"]))) == 2


@pytest.mark.slow
def test_a_front_end_whose_event_loop_hangs_is_replaced_and_the_other_one_answers(many: Server) -> None:
    hangs = many.metric("bei_process_hangs_total", process="front-0")
    before = children(many)
    with Load(many, may_break=True) as load:
        before["front-0"].send_signal(signal.SIGUSR1)
        many.wait_for_log("ERROR supervisor: front-0 has not answered for [0-9]+ s: the process is ended")
        many.wait_for_log("ERROR supervisor: front-0 was ended by SIGKILL: another one is started")
        many.wait_for_log("front-0 is ready again")
        load.wait_for_more()
    assert load.errors == []
    assert max(client.num_broken for client in load.clients) <= 1
    after = children(many)
    assert {name for name in before if before[name].pid != after[name].pid} == {"front-0"}
    assert many.metric("bei_process_hangs_total", process="front-0") == hangs + 1
    wait_until_well(many)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "name"), [("many", "engine-0"), ("spread", "manager"), ("spread", "engine-0")])
def test_a_process_that_is_stopped_under_load_is_ended_and_costs_nobody_an_answer(
    devices: str, name: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(devices)
    before = children(server)
    with Load(server) as load:
        before[name].suspend()
        server.wait_for_log(f"ERROR supervisor: .*{name}.*: the process is ended")
        server.wait_for_log(f"{name} is ready again")
        load.wait_for_more()
    assert load.errors == []
    assert server.metric("bei_process_hangs_total", process=name) >= 1
    wait_until_well(server)


def test_rebuilt_artifacts_are_swapped_in_by_all_processes_and_broken_ones_by_none(many: Server, folder: Path) -> None:
    swapped_s = {}

    def rebuild(number: int, **fields: Any) -> float:
        save_build(folder / "next", number, **fields)
        put_in_place(folder / "next", folder / "tiny")
        many.send_signal(signal.SIGHUP)
        return time.monotonic()

    with Load(many) as load:
        for build in (2, 3):
            swapped_s[build] = rebuild(build)
            many.wait_for_log("supervisor: tiny is served from the artifact")
            many.wait_for_log("has answered its last request and is closed")
            load.wait_for_more()
        levels = {name: (process.num_threads(), process.num_fds()) for name, process in children(many).items()}
        for fields, code in (({"canary_of": 90_000}, "engine_failed"), ({"name": "other"}, "swap_refused")):
            rebuild(70, **fields)
            assert f"cannot take its place: {code}: " in many.wait_for_log("ERROR supervisor: tiny is served as before")
            load.wait_for_more(1)
        swapped_s[4] = rebuild(4)
        many.wait_for_log("has answered its last request and is closed")
        many.send_signal(signal.SIGHUP)
        many.wait_for_log("supervisor: tiny: its artifact is the one that is served")
        load.wait_for_more()

        def are_given_back() -> bool:
            return all(
                process.num_threads() <= levels[name][0] and process.num_fds() <= levels[name][1]
                for name, process in children(many).items()
            )

        wait_until(are_given_back, "threads and descriptors of what was replaced are given back")
    load.check(swapped_s)
    digests = {httpx.get(f"{many.url}/info", timeout=DEADLINE_S).json()["digest"] for _ in range(8)}
    assert len(digests) == 1
    for result, count in (("swapped", 3), ("refused", 2), ("unchanged", 1)):
        assert many.metric_of_all("bei_swaps_total", result=result) == count
    children(many)["front-0"].kill()  # what takes its place serves what is served now
    many.wait_for_log("front-0 is ready again")
    assert {vectors_of(many.embed([[1, 2]]))[0][PLACE] for _ in range(8)} == {4}


def test_after_sigterm_the_accepted_are_answered_and_after_a_second_one_what_waits_is_refused(
    start: StartServer, clients: ThreadPoolExecutor, tmp_path: Path
) -> None:
    server = start("--devices", usable_cores()[0], "--http-workers", 2)
    held = [clients.submit(server.embed, [[HOLDS, value]]) for value in range(10)]
    server.wait_for_log("engine holds")
    wait_until(lambda: server.metric("bei_inputs_total") == len(held), "all are accepted")
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    late: list[Future[httpx.Response]] = []

    def are_accepted_or_refused() -> bool:
        num_refused = sum(answer.done() for answer in late)
        return server.metric("bei_inputs_total") == len(held) + len(late) - num_refused

    while len(late) < 20 and sum(answer.done() for answer in late) < 6:  # a front end may not have heard of it yet
        late.append(clients.submit(server.embed, [[1]]))
        wait_until(are_accepted_or_refused, "it is accepted or refused")
    assert not any(answer.done() for answer in held)
    (tmp_path / "open").touch()
    assert [vectors_of(answer.result(DEADLINE_S))[0] for answer in held] == [
        vector_of([HOLDS, v], 1) for v in range(10)
    ]
    refused = [answer.result(DEADLINE_S) for answer in late if answer.result(DEADLINE_S).status_code != 200]
    assert len(refused) >= 6
    for response in refused:
        check_error(response, 503, "shutting_down")
    assert server.wait_exit() == 0
    assert server.log[-1].endswith("stopped")


@pytest.mark.slow
def test_after_sigterm_what_waits_for_an_engine_that_does_not_come_is_refused_in_the_end(
    start: StartServer, clients: ThreadPoolExecutor, tmp_path: Path
) -> None:
    server = start("--http-workers", 2)
    processes = children(server)
    (tmp_path / "refuse").touch()
    processes["engine-0"].kill()
    server.wait_for_log("engine-0 cannot be started: engine_failed: There is no device")
    waiting = [clients.submit(server.embed, [[value]]) for value in range(10)]
    wait_until(lambda: server.metric("bei_inputs_total") == len(waiting), "all are accepted")
    server.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    for answer in waiting:
        check_error(answer.result(DEADLINE_S), 503, "shutting_down")
    assert server.wait_exit() == 0
    assert time.monotonic() - sent_s < 2.0 + READY_AGAIN_S  # and not ten minutes
    assert any("requests that wait for an answer get 503" in line for line in server.log)
    assert not any(process.is_running() for process in processes.values())


@pytest.mark.slow
def test_processes_that_are_started_again_serve_what_is_served_until_sighup(start: StartServer, tmp_path: Path) -> None:
    server = start("--http-workers", 2)
    digest = httpx.get(f"{server.url}/info", timeout=DEADLINE_S).json()["digest"]
    with Load(server, may_break=True) as load:
        save_build(tmp_path / "next", 2)
        put_in_place(tmp_path / "next", tmp_path / "tiny")  # and no SIGHUP
        for name in ("engine-0", "front-0"):
            children(server)[name].kill()
            server.wait_for_log(f"{name} is ready again")
            load.wait_for_more()
        assert {answer.build for client in load.clients for answer in client.answers} == {1}
        assert {httpx.get(f"{server.url}/info", timeout=DEADLINE_S).json()["digest"] for _ in range(8)} == {digest}
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("supervisor: tiny is served from the artifact")
        server.wait_for_log("has answered its last request and is closed")
        load.wait_for_more()
        assert {client.answers[-1].build for client in load.clients} == {2}
    assert load.errors == []
    assert sum("was replaced; opened is the artifact that is served" in line for line in server.log) == 2  # one each
    assert stopped(server) == 0
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_second_signal_ends_all_processes_though_a_step_does_not_end(
    start: StartServer, clients: ThreadPoolExecutor
) -> None:
    server = start("--http-workers", 2, EXIT_S="60")
    processes = children(server)
    held = [clients.submit(server.embed, [[HOLDS, value]]) for value in range(10)]
    server.wait_for_log("engine holds")
    wait_until(lambda: server.metric("bei_inputs_total") == len(held), "all are accepted")
    server.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    server.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    assert [answer.result(DEADLINE_S).status_code for answer in held] == [503] * 10
    assert server.wait_exit() == 0
    assert time.monotonic() - sent_s < READY_AGAIN_S
    assert not any(process.is_running() for process in processes.values())


@pytest.mark.slow
def test_nothing_is_left_of_a_server_whose_supervisor_is_killed(start: StartServer, tmp_path: Path) -> None:
    server = start("--http-workers", 2)
    processes = children(server)
    server.send_signal(signal.SIGKILL)
    assert server.wait_exit() == -signal.SIGKILL
    _, alive = psutil.wait_procs([*processes.values()], READY_AGAIN_S)
    assert alive == []
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_server_that_is_stopped_while_an_engine_loads_ends_at_once(start: StartServer, tmp_path: Path) -> None:
    server = start("--http-workers", 2)
    save_build(tmp_path / "next", 2, waits=True)
    put_in_place(tmp_path / "next", tmp_path / "tiny")
    with Load(server) as load:
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("engine is being loaded")
        assert state(server) == (200, 200)
        load.wait_for_more()
    server.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    assert server.wait_exit() == 0
    assert time.monotonic() - sent_s < READY_AGAIN_S


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_starts_ends_it(
    tmp_path: Path, env: Mapping[str, str], number: signal.Signals
) -> None:
    save_build(tmp_path / "tiny", 1, waits=True)
    command = [sys.executable, "-m", "tests.e2e.processes_server", tmp_path / "tiny", *("--http-workers", "2")]
    server = Server(command, env, tmp_path)
    try:
        server.wait_for_log("engine is being loaded")
        processes = children(server)
        server.send_signal(number)
        assert server.wait_exit() == 128 + number
        assert psutil.wait_procs([*processes.values()], READY_AGAIN_S)[1] == []
    finally:
        server._kill()


@pytest.mark.slow
def test_engines_are_pinned_to_their_cores_and_share_one_queue(
    start: StartServer, clients: ThreadPoolExecutor, tmp_path: Path
) -> None:
    cores = usable_cores()
    if len(cores) < 2:
        pytest.skip("there is one core")
    server = start("--devices", f"{cores[0]},{cores[1]}")
    processes = children(server)
    assert {*processes} == {"front-0", "manager", "engine-0", "engine-1"}
    assert [processes[f"engine-{index}"].cpu_affinity() for index in (0, 1)] == [[cores[0]], [cores[1]]]
    held: list[Future[httpx.Response]] = [clients.submit(server.embed, [[HOLDS, 1]])]
    server.wait_for_log("engine-[01]: engine holds")
    for value in range(5):  # by the other one
        assert vectors_of(server.embed([[value, 1]])) == [vector_of([value, 1], 1)]
    (tmp_path / "open").touch()
    assert vectors_of(held[0].result(DEADLINE_S)) == [vector_of([HOLDS, 1], 1)]


def test_one_front_end_and_one_device_are_one_process_on_its_cores(tmp_path: Path, env: Mapping[str, str]) -> None:
    save_build(tmp_path / "tiny", 1)
    core = usable_cores()[-1]
    command = [sys.executable, "-m", "tests.e2e.swapping_server", "tiny", "--devices", core, "--http-workers", 1]
    with Server(command, env, tmp_path) as server:
        process = psutil.Process(server.pid)
        assert process.children() == []
        assert process.cpu_affinity() == [core]
        assert not any("memfd" in os.readlink(link) for link in Path(f"/proc/{server.pid}/fd").iterdir())
        info = httpx.get(f"{server.url}/info", timeout=DEADLINE_S).json()
        assert (info["http_workers"], info["devices"]) == (1, [f"{core}"])
        assert vectors_of(server.embed([[1, 2]])) == [vector_of([1, 2], 1)]
        assert stopped(server) == 0


REFUSED = {
    "a core that there is not": (("--devices", "99999"), "may not use core 99999"),
    "nothing that has a device": (("--devices", "a,b"), "devices has 'a'"),
    "one core twice": (("--devices", "0,0-1"), "devices has core 0 in '0' and in '0-1'"),
    "keys that cannot be read": (("--http-workers", "2", "--api-keys-file", "missing"), "missing"),
    "an engine that cannot be loaded": (("--http-workers", "2"), "The artifact of tiny was built for fake"),
}


@pytest.mark.slow
@pytest.mark.parametrize("given", REFUSED)
def test_what_it_cannot_start_with_is_one_line(given: str, tmp_path: Path, env: Mapping[str, str]) -> None:
    flags, said = REFUSED[given]
    save_build(tmp_path / "tiny", 1)
    ended = run(["serve", tmp_path / "tiny", *flags, "--port", "0"], env, tmp_path)
    assert ended.returncode == 2
    assert [line for line in ended.stderr.splitlines() if said in line] == [ended.stderr.splitlines()[-1]]
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_lines_of_all_processes_are_whole_json(start: StartServer) -> None:
    server = start("--http-workers", 2, "--log-format", "json", "--access-log", "--log-inputs")
    with ThreadPoolExecutor(8) as pool:
        long = ["x" * 490] * 10  # lines of more than the kernel keeps whole by itself
        answers = [pool.submit(server.embed, long) for _ in range(200)]
        assert {answer.result(DEADLINE_S).status_code for answer in answers} == {200}
    assert stopped(server) == 0
    lines = [json.loads(line) for line in server.log]
    requests = [line for line in lines if line.get("route") == "/v1/embeddings"]
    assert len(requests) == 200
    assert {line["process"] for line in requests} == {"front-0", "front-1"}


@pytest.mark.slow
def test_a_real_model_is_served_from_several_processes_as_from_one(
    tiny: Artifact, env: Mapping[str, str], home: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny.path, tmp_path / "tiny")
    texts = [f"text {number} " * (1 + number % 7) for number in range(40)]
    answers = []
    for flags in ((), ("--http-workers", "2")):
        with serve([copy, *flags], env, home) as server:
            answers.append([vectors_of(server.embed(text))[0] for text in texts])
            if flags:
                shutil.rmtree(copy)  # what is served is held open
                killed = children(server)["engine-0"]
                killed.kill()
                again = vectors_of(server.embed(texts))
                assert again == [pytest.approx(one, abs=1e-5) for one in answers[-1]]
                wait_until_well(server)
            assert stopped(server) == 0
    for one, other in zip(*answers, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
