"""What a run's table says of one job."""

from __future__ import annotations

from trtopt.jobs.results import JobResult


def test_the_lines_of_a_message_stay_apart() -> None:
    message = "m.onnx can't be built:\n  nms: do it on the boxes outside the engine\nexport what comes before NMS"
    result = JobResult("j", "failed", error={"type": "UnsupportedOperator", "message": message})
    assert result.outcome == (
        "UnsupportedOperator: m.onnx can't be built: nms: do it on the boxes outside the engine; export what comes before NMS"
    )
