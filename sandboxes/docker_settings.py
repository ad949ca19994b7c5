"""What a container of driftgym's may do, as the Engine's API takes it. Nothing here asks the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from driftgym.sandboxes.base import MIB, SandboxSpec

AGENT_UID = 1000
NUM_SPARES = 5
"""Children that the toolbox keeps forked ahead; under gVisor, where processes are dear, one."""
NUM_OWN_PIDS = 3 + NUM_SPARES
"""What the init process, the toolbox and children of its need, beyond the agent's own processes."""
_NUM_GVISOR_PIDS = 64
_NUM_GVISOR_PIDS_PER_PROCESS = 8
"""What gVisor's kernel, itself a process in the box, needs for itself and for each process that it runs (measured)."""
_NUM_OWN_FILES = 1024
"""What the toolbox needs for the pipes of many commands at once; each command has the limit of the spec."""
_SHM_BYTES = 16 * MIB
_CPU_PERIOD_US = 100_000
_SYSTEM_SETTINGS = {"net.ipv4.tcp_max_tw_buckets": "0"}
"""Of the box's own network: no closed connection holds a port for another minute, past a reset. gVisor knows it not."""
_STOP_TIMEOUT_S = 1
"""How long an engine that shuts down waits for a box, which has nothing to save."""
_WALL_CAPABILITIES = {"KILL": 5, "SETGID": 6, "SETUID": 7}
"""What the toolbox needs to become another user and to kill what that one runs, with the kernel's numbers."""
_ROOT_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, **_WALL_CAPABILITIES}
"""What commands that run as root have: installing packages works, mounting, tracing and raw sockets do not."""


def agent_uid(spec: SandboxSpec) -> int:
    """Which user commands run as. As root there is no wall between them and the toolbox: they can kill and forge it."""
    return 0 if spec.run_as_root else AGENT_UID


def container_settings(
    spec: SandboxSpec,
    *,
    image: str,
    command: Sequence[str],
    labels: Mapping[str, str],
    volumes: Sequence[str] = (),
    has_quota: bool = False,
) -> dict[str, Any]:
    """The body of `POST /containers/create` for a box whose main process is `command`.

    The container has no name of ours, so that names cannot collide. Its standard input ends with the connection that
    is attached to it. What the image declares as `volumes` is an empty tmpfs like the others: a volume would be a
    place without bound that outlives a reset. `has_quota` asks for a bound on what is written to a root that is not
    read-only, which few storage drivers have.
    """
    return {
        "Image": image,
        "Entrypoint": list(command),
        "Cmd": None,
        "User": "0:0",
        "WorkingDir": "/",
        "AttachStdin": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": _STOP_TIMEOUT_S,
        "HostConfig": _host_settings(spec, volumes=volumes, has_quota=has_quota),
    }


def writable_folders(volumes: Sequence[str]) -> list[str]:
    """Where files can be written in a box whose root is read-only, besides /work and /tmp: `reset` empties them."""
    return ["/dev/shm", "/dev/mqueue", *volumes]


def toolbox_settings(spec: SandboxSpec, *, volumes: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of the toolbox in a container; see the docstring of `toolbox`."""
    return {
        "uid": agent_uid(spec),
        "gid": agent_uid(spec),
        "root_capabilities": sorted(_ROOT_CAPABILITIES.values()) if spec.run_as_root else [],
        "is_root_writable": not spec.read_only_root,
        "work_dir": "/work",
        "tmp_dir": "/tmp",
        "more_dirs": writable_folders(volumes),
        "limits": {"nofile": spec.max_open_files},
        "num_spares": 1 if _is_gvisor(spec) else NUM_SPARES,
        "dead_man_s": spec.dead_man_s,
    }


def _host_settings(spec: SandboxSpec, *, volumes: Sequence[str], has_quota: bool) -> dict[str, Any]:
    uid = agent_uid(spec)
    size = f"size={spec.work_dir_bytes}"
    own_folder = f"rw,exec,nosuid,nodev,{size},mode=0755,uid={uid},gid={uid}"
    return {
        "NetworkMode": spec.network,
        "Sysctls": _SYSTEM_SETTINGS,
        **_name_settings(spec),
        "CapDrop": ["ALL"],
        "CapAdd": sorted(_ROOT_CAPABILITIES if spec.run_as_root else _WALL_CAPABILITIES),
        "SecurityOpt": ["no-new-privileges:true"],
        "ReadonlyRootfs": spec.read_only_root,
        "Tmpfs": {
            **dict.fromkeys(volumes, own_folder),
            "/work": own_folder,
            "/tmp": f"rw,exec,nosuid,nodev,{size},mode=1777",
        },
        **({"StorageOpt": {"size": str(spec.work_dir_bytes)}} if has_quota else {}),
        **({"Runtime": spec.runtime} if spec.runtime is not None else {}),
        "ShmSize": _SHM_BYTES,
        "Memory": spec.memory_bytes,
        "MemorySwap": spec.memory_bytes,
        "PidsLimit": _pids_limit(spec),
        # Not `NanoCpus`, which an engine of fewer cores refuses.
        "CpuPeriod": _CPU_PERIOD_US,
        "CpuQuota": int(spec.num_cpus * _CPU_PERIOD_US),
        "Ulimits": _resource_limits(spec),
        "Init": True,
        "IpcMode": "private",
        "LogConfig": {"Type": "none", "Config": {}},
        "AutoRemove": True,
    }


def _is_gvisor(spec: SandboxSpec) -> bool:
    return "runsc" in (spec.runtime or "")


def _pids_limit(spec: SandboxSpec) -> int:
    """For the whole box. Under gVisor its kernel counts too, and ends, and the box with it, where it gets no more."""
    num_pids = spec.max_pids + NUM_OWN_PIDS
    if not _is_gvisor(spec):
        return num_pids
    return _NUM_GVISOR_PIDS + _NUM_GVISOR_PIDS_PER_PROCESS * num_pids


def _resource_limits(spec: SandboxSpec) -> list[dict[str, Any]]:
    limits = {"nofile": spec.max_open_files + _NUM_OWN_FILES, "core": 0}
    if not spec.read_only_root:
        limits["fsize"] = spec.work_dir_bytes  # what a tmpfs bounds by its size
    return [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in limits.items()]


def _name_settings(spec: SandboxSpec) -> dict[str, Any]:
    """A box without network is not told where this machine asks for names, and its own questions fail at once."""
    if spec.network != "none":
        return {}
    return {"Dns": ["127.0.0.1"], "DnsSearch": ["."], "DnsOptions": ["timeout:1", "attempts:1"]}
