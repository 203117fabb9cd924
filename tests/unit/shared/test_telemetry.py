"""What a service writes to stderr is JSON, whoever writes it."""

import json
import subprocess
import sys

from tests.architecture.source import ROOT

CODE = """
import logging, structlog
from opentelemetry.sdk.trace import TracerProvider
from services.shared import telemetry, tracing
telemetry.setup("router")
structlog.get_logger().info("ours", size=3)
structlog.get_logger().debug("too fine")
logging.getLogger("library").warning("theirs %d", 5)
logging.getLogger("library").info("not wanted")
try:
    raise ValueError("why")
except ValueError:
    structlog.get_logger().error("failed", exc_info=True)
tracing.use(TracerProvider(), ratio=0.0)
tracing.enter(min(tracing.ROOTS), {}, request_id="r", trusted=False)
structlog.get_logger().info("left out")
with tracing.part("router.queue"):
    structlog.get_logger().info("its part")
"""


def test_every_line_is_json() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"], line["level"], line["service"]) for line in lines] == [
        ("ours", "info", "router"),
        ("theirs 5", "warning", "router"),
        ("failed", "error", "router"),
        ("left out", "info", "router"),
        ("its part", "info", "router"),
    ]
    assert "ValueError: why" in lines[2]["exception"]
    # Lines of one request have one trace, sampled or not.
    assert not any("trace_id" in line for line in lines[:3])
    assert len(lines[3]["trace_id"]) == 32
    assert lines[3]["trace_id"] == lines[4]["trace_id"]
