"""What a person is told to enable where the sandbox cannot start."""

import os

import pytest

from mars2_jax.grading import sandbox


def machine(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "user", "said", "wanted"),
    [
        (
            {"proc/sys/kernel/unprivileged_userns_clone": "0\n"},
            1000,
            "",
            "`sysctl -w kernel.unprivileged_userns_clone=1` on the host, or set --config.grading.isolation=none",
        ),
        (
            {"proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1", "proc/sys/user/max_user_namespaces": "0"},
            1000,
            "",
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` on the host, "
            "`sysctl -w user.max_user_namespaces=15000` on the host, or set",
        ),
        ({"proc/sys/kernel/unprivileged_userns_clone": "1"}, 1000, "", "allow user namespaces to this user, or set"),
        ({"proc/sys/kernel/unprivileged_userns_clone": "0"}, 0, "", "give root CAP_SYS_ADMIN, or set"),
        (
            {".dockerenv": ""},
            0,
            "",
            "start the container with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--cap-add SYS_ADMIN` (Kubernetes: securityContext with seccompProfile and appArmorProfile of type "
            "Unconfined, capabilities.add [SYS_ADMIN]), or set",
        ),
        (
            {"run/.containerenv": "", "proc/sys/kernel/unprivileged_userns_clone": "0"},
            1000,
            "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
            "`sysctl -w kernel.unprivileged_userns_clone=1` on the host, start the container with `--security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined` (Kubernetes: "
            "securityContext with seccompProfile and appArmorProfile of type Unconfined, procMount Unmasked), or set",
        ),
    ],
)
def test_remedy(tmp_path, monkeypatch, files, user, said, wanted):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    text = sandbox.remedy(said, machine(tmp_path, files))
    assert text.startswith(wanted)
    assert "\n" not in text
