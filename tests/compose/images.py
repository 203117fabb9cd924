"""The images of the test, without pulling any: a base by debootstrap, Debian's Redis and PostgreSQL, rclone as S3.

Built wheels and the base's file system are kept in a cache directory, since making them takes minutes.
"""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tests.compose.engine import Engine, run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DEBIAN = "loraport-test/debian:bookworm"
SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "ca-certificates", "redis-server", "postgresql-15")
# What the builder needs, and what an older patch release of Python, as Debian has it, needs on top of the pins.
EXTRA_WHEELS = ("setuptools>=77", "wheel", "async-timeout>=4.0.3")
EXTRAS = "services,registry,loader,router,executor"
TORCH = "torch==2.13.0"
SERVICES = ("registry", "loader", "router", "executor", "tools")

Report = Callable[[str], None]


def variables() -> dict[str, str]:
    """Returns the image variables of deploy/compose.yaml."""
    names = {f"LORAPORT_{service.upper()}_IMAGE": f"loraport-test/{service}:dev" for service in SERVICES}
    others = {f"LORAPORT_{other.upper()}_IMAGE": f"loraport-test/{other}:dev" for other in ("redis", "postgres", "s3")}
    return {**names, **others}


def build(engine: Engine, cache: Path, context: Path, report: Report) -> None:
    """Builds every image of the test. `context` is a clean checkout. Raises RuntimeError."""
    cache.mkdir(parents=True, exist_ok=True)
    _debian(engine, cache, report)
    _fill_wheels(cache / "wheels", report)
    wheels = context / "deploy" / "wheels"
    for wheel in (cache / "wheels").glob("*.whl"):
        shutil.copy(wheel, wheels)
    for service in SERVICES:
        report(f"image {service}")
        arguments = {"BASE_IMAGE": DEBIAN, "PIP_ARGS": "--no-index --find-links /wheels"}
        _docker_build(engine, context, context / "deploy" / "Dockerfile", service, arguments, target=service)
    for name in ("redis", "postgres", "s3"):
        report(f"image {name}")
        folder = context / "stand-in" / name
        shutil.copytree(HERE / "images" / name, folder)
        if name == "s3":
            shutil.copy(Path(sysconfig.get_path("scripts")) / "rclone", folder / "rclone")
        _docker_build(engine, folder, folder / "Dockerfile", name, {"DEBIAN": DEBIAN})


def _docker_build(
    engine: Engine, context: Path, file: Path, name: str, arguments: dict[str, str], *, target: str = ""
) -> None:
    pairs = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    chosen = ["--target", target] if target else []
    tag = f"loraport-test/{name}:dev"
    # Without a network: what is built has been downloaded before, pinned.
    engine.docker(
        *("build", "-q", "--network", "none", "-f", str(file), *pairs, *chosen, "-t", tag, str(context)), timeout=1800
    )


def _debian(engine: Engine, cache: Path, report: Report) -> None:
    """Makes Debian's base system with the packages of all stand-ins, and imports it."""
    archive = cache / f"{SUITE}.tar"
    if not archive.exists():
        if shutil.which("debootstrap") is None:
            raise RuntimeError("debootstrap is not installed")
        report("base image: debootstrap (minutes)")
        folder = cache / "rootfs"
        shutil.rmtree(folder, ignore_errors=True)
        run(["debootstrap", "--variant=minbase", SUITE, str(folder)], timeout=1800)
        # Packages that bring a server must not start it in there.
        policy = folder / "usr" / "sbin" / "policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        script = (
            "export DEBIAN_FRONTEND=noninteractive && apt-get update -qq && "
            f"apt-get install -y -qq --no-install-recommends {' '.join(PACKAGES)} && "
            "apt-get clean && rm -rf /var/lib/apt/lists/*"
        )
        run(["chroot", str(folder), "sh", "-c", script], timeout=1800)
        partial = archive.with_suffix(".part")
        run(["tar", "-C", str(folder), "--exclude=./proc/*", "--exclude=./sys/*", "-cf", str(partial), "."])
        partial.replace(archive)
        shutil.rmtree(folder, ignore_errors=True)
    report("base image: import")
    engine.docker("import", str(archive), DEBIAN)


def _fill_wheels(folder: Path, report: Report) -> None:
    """Downloads every wheel that the images install, at the pinned versions."""
    if (folder / ".complete").exists():
        return
    report("wheels")
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "-d", str(folder)]
    pins = ["-c", str(ROOT / "constraints.txt"), "--find-links", str(folder)]
    for wanted in ([TORCH], [TORCH, f"{ROOT}[{EXTRAS}]", *EXTRA_WHEELS]):
        done = subprocess.run([*pip, *pins, *wanted], capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            raise RuntimeError(f"pip download: {done.stderr.strip().splitlines()[-1:]}")
    for archive in folder.glob("loraport-*"):
        archive.unlink()
    (folder / ".complete").touch()
