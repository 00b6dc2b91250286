"""Manifests against the models that Kubeflow publishes of Kubernetes' API, and their pods as processes of this host."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.cli import main

yaml = pytest.importorskip("yaml")
models = pytest.importorskip("kubeflow_trainer_api.models")

MODELS = {
    "Secret": "IoK8sApiCoreV1Secret",
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
PROGRAM = """
import torch, unisono as un
world = un.join(device="cpu")
x = torch.full((3,), float(world.rank + 1))
world.all_reduce(x).wait()
assert x.tolist() == [1.5] * 3, x
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    return "train.py"


def written(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """The documents that `unisono run --print` gives."""
    assert main(["run", "--print", *options]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (["--claim", "runs:/data", "--namespace", "ml"], ["Secret", "Service", "Job"]),
        (["--kind", "jobset", "--claim", "runs:/data"], ["Secret", "JobSet"]),
        (["--kind", "trainjob"], ["Secret", "TrainJob"]),
    ],
)
def test_manifests_are_what_the_published_models_take(
    program: str, capsys: pytest.CaptureFixture[str], options: list[str], kinds: list[str]
) -> None:
    asked = ["--on", "kubernetes", "-n", "4", "--image", "r/train:1", "--gpus", "1", "--memory", "8Gi"]
    found = written(capsys, *asked, *options, program, "--lr", "0.1")
    assert [document["kind"] for document in found] == kinds
    for document in found:  # a name that the model does not know is lost on the way
        assert getattr(models, MODELS[document["kind"]]).from_dict(document).to_dict() == document


@pytest.mark.parametrize("stem", ["2gpus", "a" * 39 + "_b", "_"])
def test_names_are_those_that_a_service_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{stem}.py").touch()
    found = written(capsys, "--on", "kubernetes", "-n", "2", "--image", "r/train:1", f"{stem}.py")
    (name,) = {document["metadata"]["name"] for document in found}
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)  # RFC 1035's label


def test_pods_of_a_job_meet_as_their_manifest_says(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each pod as a process: its index is what Kubernetes writes there, rank 0's name is this host's."""
    secret, _, job = written(capsys, "--on", "kubernetes", "-n", "2", "--image", "r/train:1", program)
    container = job["spec"]["template"]["spec"]["containers"][0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pods = []
    for index in range(job["spec"]["completions"]):
        env = {item["name"]: item.get("value", "") for item in container["env"]}
        assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{job['spec']['template']['spec']['subdomain']}"
        env |= {"RANK": str(index), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env["UNISONO_SECRET"] = secret["stringData"]["secret"]
        command = [sys.executable, *container["command"][1:]]
        pods.append(subprocess.Popen(command, env={**os.environ, **env}))
    assert [pod.wait(120) for pod in pods] == [0, 0]


def test_a_preempted_pod_is_started_again_and_not_counted(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = written(capsys, "--on", "kubernetes", "-n", "2", "--grace", "90s", "--image", "r/train:1", program)[-1]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {"containerName": "worker", "operator": "In", "values": [143]} in [rule.get("onExitCodes") for rule in rules]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 95


def test_a_skypilot_task_tells_each_machine_who_it_is(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    (task,) = written(capsys, "--on", "skypilot", "-n", "2", "--accelerators", "A100:1", program)
    assert task["num_nodes"] == 2
    assert task["setup"] == "pip install ./unisono-*.whl"
    env = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    script = task["run"].replace("exec python train.py", 'echo "$RANK $WORLD_SIZE $MASTER_ADDR"')
    said = subprocess.run(["sh", "-c", script], env={**os.environ, **env}, capture_output=True, text=True, check=True)
    assert said.stdout == "1 2 10.0.0.1\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--on", "kubernetes", "--print", "-n", "2"], "no image given"),
        (["--on", "kubernetes", "--print", "-n", "1:2", "--image", "x"], "pods are as many as the manifest says"),
        (["--on", "kubernetes", "--print", "-n", "2", "--image", "x", "--gpus", "0.5"], "whole number of GPUs"),
        (["--on", "kubernetes", "--print", "-n", "2", "--image", "x", "--claim", "x"], "expected CLAIM:/PATH"),
        (["--on", "kubernetes", "-n", "2", "--image", "x"], "add --print"),
        (["--print", "-n", "2"], "--print goes with --on kubernetes or --on skypilot"),
    ],
)
def test_what_cannot_be_written_is_named(
    program: str, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    try:
        status = main(["run", *options, program])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status in (1, 2)
    assert words in capsys.readouterr().err
