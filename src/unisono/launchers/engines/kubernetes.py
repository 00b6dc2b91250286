"""Manifests for Kubernetes, which starts the pods itself: an Indexed Job, a JobSet, or Kubeflow's TrainJob.

`unisono run --on kubernetes --print -n 8 train.py | kubectl apply -f -`. One pod per worker. Nothing of ours runs
beside the program: each pod is told its rank, where rank 0 is, and the run's secret, and the workers meet by
themselves.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from unisono.launchers.engines.engine import Engine, EngineError
from unisono.launchers.job import Job

__all__ = ["KEPT", "PORT", "Kubernetes", "Manifests", "name_job", "write_yaml"]

PORT = 29500  # of rank 0's store
_RESTARTS = 6  # how many losses a job survives; those by preemption do not count
_PREEMPTED = 143  # exit status of a worker that saved and left after SIGTERM
# Variables of this process that the workers need too: options of `unisono run` set some of them.
KEPT = ("UNISONO_STRATEGY", "UNISONO_ENCRYPT", "UNISONO_BALANCE", "UNISONO_PORTS", "UNISONO_SPOT", "UNISONO_TIMEOUT_S")


@dataclass(frozen=True)
class Manifests(Engine):
    """A cluster that starts workers from a file."""

    def check(self, workers: int) -> None:
        raise EngineError(
            f"--on {self.name} writes what the cluster starts, and starts nothing itself: add --print, and hand the "
            f"output to {self._hand_over()}"
        )

    def _hand_over(self) -> str:
        raise NotImplementedError

    def manifest(self, job: Job) -> str:
        """What to hand to the cluster, as YAML."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kubernetes(Manifests):
    """An Indexed Job, a JobSet or Kubeflow's TrainJob.

    Arguments:
        image: the container image, with Python, torch, unisono and the program.
        kind: "job" needs nothing but Kubernetes 1.31; "jobset" restarts all pods together (the JobSet controller);
            "trainjob" uses Kubeflow's runtime torch-distributed.
        namespace: where to create it; None: kubectl's own.
        cpus: cores that a pod asks for, and computing threads of its worker.
        memory: that a pod asks for, as Kubernetes writes it: 8Gi.
        gpus: NVIDIA GPUs of a pod.
        claim: a PersistentVolumeClaim and where to mount it: checkpoints:/data.
    """

    name: ClassVar[str] = "kubernetes"

    image: str = ""
    kind: str = "job"
    namespace: str | None = None
    cpus: float = 1
    memory: str | None = None
    gpus: float = 0
    claim: str | None = None

    def _hand_over(self) -> str:
        return "`kubectl apply -f -`"

    def manifest(self, job: Job) -> str:
        """A Secret, a Service where pods need one to find rank 0, and the job."""
        self._check(job)
        name = name_job(job)
        documents = [self._secret(name)]
        if self.kind == "job":
            documents += [self._service(name), self._object("batch/v1", "Job", name, self._job_spec(name, job))]
        elif self.kind == "jobset":
            documents.append(self._object("jobset.x-k8s.io/v1alpha2", "JobSet", name, self._job_set_spec(name, job)))
        else:
            documents.append(self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", name, self._train_spec(job)))
        return "---\n".join(map(write_yaml, documents))

    def _check(self, job: Job) -> None:
        if not self.image:
            raise ValueError("no image given: --image REGISTRY/NAME:TAG, with Python, unisono and the program in it")
        if self.kind not in ("job", "jobset", "trainjob"):
            raise ValueError(f"got --kind {self.kind}; expected job, jobset or trainjob")
        if job.elastic is not None:
            raise ValueError(
                "pods are as many as the manifest says: give -n MAX. After a loss they are started again, and the "
                "program resumes from its checkpoint"
            )
        if self.claim is not None and self.kind == "trainjob":
            raise ValueError("a TrainJob has the volumes of its runtime: leave --claim out, and name them there")
        if self.gpus != int(self.gpus):
            raise ValueError(f"got --gpus {self.gpus:g}; a pod has a whole number of GPUs")
        if self.claim is not None and not re.fullmatch(r"[a-z0-9.-]+:/.*", self.claim):
            raise ValueError(f"got --claim {self.claim}; expected CLAIM:/PATH, such as checkpoints:/data")

    def _object(self, api: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        metadata = {"name": name} | ({} if self.namespace is None else {"namespace": self.namespace})
        return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}

    def _secret(self, name: str) -> dict[str, Any]:
        made = self._object("v1", "Secret", name, {})
        del made["spec"]
        return made | {"type": "Opaque", "stringData": {"secret": secrets.token_hex(32)}}

    def _service(self, name: str) -> dict[str, Any]:
        """A name in the cluster's DNS for each pod, from the moment it starts."""
        selector = {"batch.kubernetes.io/job-name": name}
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        return self._object("v1", "Service", name, spec)

    def _job_spec(self, name: str, job: Job, *, restarts: int | None = None) -> dict[str, Any]:
        """Pods that save and leave after SIGTERM, or whose node is drained, are started again without being counted.

        Where one pod is lost, the others end with an error and are started again too: each loss counts once a pod.
        """
        ignored = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {"containerName": "worker", "operator": "In", "values": [_PREEMPTED]}},
        ]
        return {
            "completionMode": "Indexed",
            "completions": job.workers,
            "parallelism": job.workers,
            "backoffLimit": _RESTARTS * job.workers if restarts is None else restarts,
            **({"podFailurePolicy": {"rules": ignored}} if restarts is None else {}),
            "template": {"spec": self._pod(name, job)},
        }

    def _job_set_spec(self, name: str, job: Job) -> dict[str, Any]:
        workers = {"name": "workers", "replicas": 1, "template": {"spec": self._job_spec(name, job, restarts=0)}}
        return {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "replicatedJobs": [workers],
        }

    def _train_spec(self, job: Job) -> dict[str, Any]:
        """The runtime tells torchrun in each pod who it is, by variables PET_*."""
        trainer = {
            "image": self.image,
            "command": ["torchrun"],
            "args": [*job.program],
            "numNodes": job.workers,
            "numProcPerNode": 1,
            "env": self._env(name_job(job)),
            "resourcesPerNode": self._resources(),
        }
        return {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}

    def _pod(self, name: str, job: Job) -> dict[str, Any]:
        first = f"{name}-workers-0-0" if self.kind == "jobset" else f"{name}-0"
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        place = [
            {"name": "RANK", "valueFrom": index},
            {"name": "WORLD_SIZE", "value": str(job.workers)},
            {"name": "MASTER_ADDR", "value": f"{first}.{name}"},
            {"name": "MASTER_PORT", "value": str(PORT)},
        ]
        mounts: list[dict[str, Any]] = [{"name": "memory", "mountPath": "/dev/shm"}]
        volumes: list[dict[str, Any]] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]  # 64 MB else: DataLoader
        if self.claim is not None:
            claim, _, path = self.claim.partition(":")
            mounts.append({"name": "data", "mountPath": path})
            volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
        container = {
            "name": "worker",
            "image": self.image,
            "command": ["python", *job.program],
            "env": place + self._env(name),
            "resources": self._resources(),
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": mounts,
        }
        return {
            "restartPolicy": "Never",
            **({} if self.kind == "jobset" else {"subdomain": name}),
            "terminationGracePeriodSeconds": round(job.grace_s) + 5,
            "containers": [container],
            "volumes": volumes,
        }

    def _env(self, name: str) -> list[dict[str, Any]]:
        secret = {"secretKeyRef": {"name": name, "key": "secret"}}
        settings = {key: os.environ[key] for key in KEPT if key in os.environ}
        settings["OMP_NUM_THREADS"] = str(max(1, int(self.cpus)))
        given = [{"name": key, "value": value} for key, value in settings.items()]
        return [{"name": "UNISONO_SECRET", "valueFrom": secret}, *given]

    def _resources(self) -> dict[str, Any]:
        asked = {"cpu": f"{self.cpus:g}"} | ({} if self.memory is None else {"memory": self.memory})
        gpus = {"nvidia.com/gpu": str(int(self.gpus))} if self.gpus else {}
        limits = gpus | ({} if self.memory is None else {"memory": self.memory})
        return {"requests": asked | gpus} | ({"limits": limits} if limits else {})


def name_job(job: Job) -> str:
    """A name that the cluster's DNS takes, from the program's: it begins with a letter."""
    program: Sequence[str] = job.program
    stem = (program[1].rpartition(".")[2] or program[1]) if program[0] == "-m" else Path(program[0]).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return (name if name[:1].isalpha() else f"unisono-{name}")[:40].strip("-")


def write_yaml(value: Any, indent: str = "") -> str:
    """Nested dicts and lists as YAML, strings in JSON's quotes.

    >>> print(write_yaml({"kind": "Job", "args": ["a", {"b": 1}], "on": True}), end="")
    kind: "Job"
    args:
      - "a"
      - b: 1
    on: true
    """
    lines = []
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in items:
        head = f"{indent}- " if key is None else f"{indent}{key}: "
        if not isinstance(item, dict | list):
            lines.append(f"{head}{json.dumps(item)}\n")
        elif not item:
            lines.append(head + ("{}\n" if isinstance(item, dict) else "[]\n"))
        elif key is None:  # the first line of a list's item stands beside its dash
            lines.append(head + write_yaml(item, indent + "  ").removeprefix(indent + "  "))
        else:
            lines.append(f"{head.rstrip()}\n" + write_yaml(item, indent + "  "))
    return "".join(lines)
