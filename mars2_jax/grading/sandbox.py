"""The command line that a worker runs under, and the check that it holds what it promises."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from mars2_jax.errors import SandboxError

__all__ = ["ENVIRONMENT", "PROBE", "PROBE_OUTPUT", "UNPROTECTED", "command", "probe_input", "remedy"]

# Set iteration order must not differ from one worker to the next, so hashing is not randomised.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}

UNPROTECTED = "or set --config.grading.isolation=none to run model-written programs unprotected"
# What a kernel may forbid: file under /proc/sys, value that forbids, what to set.
_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
)
_CONTAINER_FILES = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")
_PACKAGE = Path(__file__).resolve().parent.parent
_RUN_INSIDE = ("runner", "child", "pipes", "seccomp", "system", "values")
_MODULES = ("__init__.py", "grading/__init__.py", *(f"grading/{m}.py" for m in _RUN_INSIDE))
_INSIDE = "/grader"


def command(isolation: str, uid: int) -> list[str]:
    """The worker's command.

    The interpreter is the one underneath `sys.executable` (not its virtual environment), with its standard library
    only. Of the host's files a program can read those and the system's shared libraries; folders of installed
    packages are covered, since packages may hold solutions.

    Args:
      isolation: "bubblewrap" or "none".
      uid: under bubblewrap as root, programs run as this user and assertions as the next one. Nothing else on the
        host should run as these.

    Raises:
      SandboxError: bubblewrap is wanted and not installed.
    """
    root = str(_PACKAGE.parent) if isolation == "none" else _INSIDE
    start = (
        f"import sys; sys.path.insert(0, {root!r}); from mars2_jax.grading.runner import main; "
        f"del sys.path[0]; main({isolation!r}, {uid})"
    )
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    # As -I, but the hash seed is taken from the environment, which holds nothing else.
    python = [interpreter, "-s", "-S", "-P", "-B", "-c", start]
    if isolation == "none":
        return python
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(f"bubblewrap is not installed: `apt-get install bubblewrap`, {UNPROTECTED}")
    arguments = [bwrap, "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    arguments += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if os.geteuid() != 0:
        # Root of a user namespace, which is what it takes to give every program namespaces of its own.
        arguments += ["--unshare-user", "--cap-add", "ALL"]
    binds: dict[str, str] = {}  # inside -> outside
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"):
        # Debian keeps shared libraries in a folder of their own, so that the rest of /usr/lib need not be shown.
        narrow = os.path.join(path, sysconfig.get_config_var("MULTIARCH") or "-")
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            path = narrow if os.path.isdir(narrow) else path
            binds[path] = path
    libraries = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    if sys.base_prefix != "/usr":  # libpython, and whatever else an interpreter in a folder of its own comes with
        libraries.insert(0, str(Path(sys.base_prefix, "lib")))
    binds |= {path: path for path in [*libraries, interpreter]}
    binds |= {f"{_INSIDE}/mars2_jax/{module}": str(_PACKAGE / module) for module in _MODULES}
    # bubblewrap would create the folders above these for their owner alone.
    for folder in sorted({str(parent) for path in binds for parent in Path(path).parents} - {"/"}):
        arguments += ["--perms", "0755", "--dir", folder]
    for inside, outside in binds.items():
        arguments += ["--ro-bind", outside, inside]
    for path in _package_folders(list(binds)):
        arguments += ["--tmpfs", path]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
    # /dev/full reads as /dev/zero does, but cannot be mapped as shared memory, which no limit counts.
    arguments += ["--dev-bind", "/dev/full", "/dev/zero", "--remount-ro", "/dev", "--remount-ro", "/"]
    arguments += ["--chdir", "/tmp", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--", *python]


def _package_folders(bound: list[str]) -> list[str]:
    """Where pip and the system's package manager install Python packages, inside the folders that are bound."""
    found = {
        str(folder)
        for library in bound
        for pattern in ("site-packages", "dist-packages", "python3*/site-packages", "python3*/dist-packages")
        for folder in Path(library).glob(pattern)
        if folder.is_dir() and not folder.is_symlink()
    }
    return sorted(found)


def remedy(said: str, root: Path = Path("/")) -> str:
    """What to enable where the sandbox did not start, for a message of one line.

    Args:
      said: what bubblewrap said.
      root: the file system to look at for the reason.
    """
    steps = []
    for name, forbids, setting in _SWITCHES:
        path = root / "proc/sys" / name
        # Root needs no user namespace.
        if os.geteuid() != 0 and path.exists() and path.read_text().strip() == forbids:
            steps.append(f"`sysctl -w {setting}` on the host")
    if any((root / name).exists() for name in _CONTAINER_FILES):
        docker = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        if os.geteuid() == 0:
            docker += " --cap-add SYS_ADMIN"
        elif "proc" in said:
            docker += " --security-opt systempaths=unconfined"
        kubernetes = "seccompProfile and appArmorProfile of type Unconfined" + (
            ", capabilities.add [SYS_ADMIN]" if os.geteuid() == 0 else ", procMount Unmasked"
        )
        steps.append(f"start the container with `{docker}` (Kubernetes: securityContext with {kubernetes})")
    elif not steps:
        steps.append("allow user namespaces to this user" if os.geteuid() else "give root CAP_SYS_ADMIN")
    return f"{', '.join(steps)}, {UNPROTECTED}"


PROBE = """
import os, socket
secret, port, filtered, host = input(), int(input()), input() == "filtered", input().split()
try:
    open(secret).close()
    print("the host's file", secret, "can be read")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    print("the host's network can be reached")
except OSError:
    pass
for name in ("net", "pid", "mnt", "ipc", "uts"):
    if os.readlink(f"/proc/self/ns/{name}") in host:
        print(f"the {name} namespace is the host's")
others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()}
if others or os.getppid() != 1:
    print("other processes can be seen")
for folder in ("/", "/dev", "/usr/lib"):
    if os.access(folder, os.W_OK):
        print(folder, "can be written to")
if os.getuid() == 0:
    print("programs run as root")
with open("/proc/self/status") as file:
    fields = dict(line.split(":", 1) for line in file)
if int(fields["CapPrm"], 16) or int(fields["CapEff"], 16) or fields["NoNewPrivs"].strip() != "1":
    print("programs have privileges")
if sorted(os.environ) not in (["LANG", "PYTHONHASHSEED"], ["LANG", "PWD", "PYTHONHASHSEED"]):
    print("the host's environment is visible")
if filtered:
    from mars2_jax.grading import seccomp
    for name in seccomp.unfiltered():
        print("programs may call", name)
print("end of probe")
"""
"""A program that tries to leave the sandbox in the plainest ways and prints what succeeded."""

PROBE_OUTPUT = "end of probe"


def probe_input(port: int, filtered: bool) -> str:
    """What the probe reads: a file that only the host has, a port that something on the host listens to, whether there
    should be a filter of system calls, and the host's namespaces."""
    namespaces = [os.readlink(path) for path in Path("/proc/self/ns").iterdir()]
    secret = _PACKAGE / "grading" / "service.py"
    return f"{secret}\n{port}\n{'filtered' if filtered else 'not filtered'}\n{' '.join(namespaces)}\n"
