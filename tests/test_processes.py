"""Loss scaling over processes: one of them overflows, and all skip the step; one dies, and a run goes on."""

import os
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import process_script as script
import pytest

SECONDS = 120


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(processes, out, *more):
    """Runs so many processes, which end with this function, however it ends; `known` has what they found."""
    address = f"127.0.0.1:{free_port()}"
    # One device and one thread for computing each. This process's flags would give each eight; the others
    # are for compiling fast.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    env = os.environ | {
        "XLA_FLAGS": " ".join([*flags, "--xla_cpu_multi_thread_eigen=false"]),
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
    }
    running = []
    try:
        for process in range(processes):
            command = [sys.executable, script.__file__, address, *map(str, (processes, process, out, *more))]
            with (out / f"{process}.log").open("w") as log:
                running.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + SECONDS
        while any(p.poll() is None for p in running) and time.monotonic() < deadline:
            if any(p.poll() for p in running):
                break  # The others would wait for the one that failed.
            time.sleep(0.05)
    finally:
        for p in running:
            p.kill()
        codes = [p.wait() for p in running]
    logs = "".join(
        f"\n--- process {n}, {code}\n{(out / f'{n}.log').read_text()}" for n, code in enumerate(codes)
    )
    if any(codes):
        raise RuntimeError(logs)


def known(processes, out):
    """What each of so many processes has found."""
    return [dict(np.load(out / f"{process}.npz")) for process in range(processes)]


def check_decisions(found):
    """The bad step, and no other, left every shard of every parameter as it was and halved the scale."""
    taken = [step != script.BAD_STEP for step in range(script.STEPS)]
    after = script.STEPS - script.BAD_STEP
    for way in script.WAYS:
        moved = found.pop(f"{way} moved")  # By shards, of which each process has its own.
        assert moved.all(axis=1).tolist() == moved.any(axis=1).tolist() == taken
        assert found[f"{way} finite"].tolist() == taken
        assert found[f"{way} scale"].tolist() == [2.0**10] * script.BAD_STEP + [2.0**9] * after
        assert np.isfinite(found[f"{way} loss"]).tolist() == taken


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What processes have found in three runs, by name: most of the time is starting them.

    Two train both ways and to the end with checkpoints, and again, when one dies; two go on from there, and
    four, which train both ways besides.
    """

    def folder(name):
        return tmp_path_factory.mktemp(name)

    two, again, wider, checkpoints = map(folder, ("two", "again", "wider", "checkpoints"))
    with pytest.raises(RuntimeError, match=r"process 1, -9\b"):
        run(2, two, "both", two / "whole", checkpoints / "two", script.BAD_STEP - 1)
    shutil.copytree(checkpoints / "two", checkpoints / "four")
    run(2, again, "checkpoints", checkpoints / "two")
    run(4, wider, "both", checkpoints / "four")
    return {"whole": known(2, two), "again": known(2, again), "wider": known(4, wider)}


def part(of_one, is_of_way):
    """Of what one process has found, that of the trainings both ways, or that of the other one."""
    return {name: x for name, x in of_one.items() if name.startswith(script.WAYS) == is_of_way}


@pytest.mark.once
@pytest.mark.parametrize("name", ["whole", "wider"])
def test_one_process_overflows_and_all_skip(name, found):
    alone = {name: value for way in script.WAYS for name, value in script.train(way).items()}
    each = [part(of_one, True) for of_one in found[name]]
    for of_one in (alone, *each):
        check_decisions(of_one)
    for other in each[1:]:
        assert other.keys() == alone.keys()
        assert all(other[name].tobytes() == value.tobytes() for name, value in each[0].items())
    for name, value in alone.items():
        if value.dtype == np.float32:
            # Sharded matrices make devices sum parts of a product, which are float16.
            tolerance = 2.0**-9 if name.startswith("jit") else 1e-5
            np.testing.assert_allclose(each[0][name], value, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(each[0][name], value, err_msg=name)


@pytest.mark.once
def test_a_process_dies_and_the_run_goes_on_in_as_many_or_more(found):
    """The step after the checkpoint is the one that all skip."""
    whole, again, wider = (part(found[name][0], False) for name in ("whole", "again", "wider"))
    assert whole.pop("began") == 0
    assert again.pop("began") == script.BAD_STEP
    assert {name: value.tobytes() for name, value in again.items()} == {
        name: value.tobytes() for name, value in whole.items()
    }
    assert wider.pop("began") == script.BAD_STEP
    assert wider.keys() == whole.keys()
    for name, value in wider.items():
        np.testing.assert_allclose(value, whole[name], rtol=2.0**-9, atol=2.0**-9, err_msg=name)
    assert [whole[name] for name in whole if name.endswith(".loss_scale")] == [2.0**9]


def test_what_a_process_says_is_shown_when_it_fails(tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys, time\nsys.argv[3] == '1' and sys.exit('out of memory')\ntime.sleep(600)")
    monkeypatch.setattr(script, "__file__", str(broken))
    with pytest.raises(RuntimeError, match="process 1, 1\nout of memory"):
        run(2, tmp_path, "both", tmp_path / "checkpoints")
