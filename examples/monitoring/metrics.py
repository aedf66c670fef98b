# SPDX-License-Identifier: Apache-2.0
"""Read a server's metrics: requests in progress, cache use and latency.

quire serve
python examples/monitoring/metrics.py
"""

import os
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

URL = os.environ.get("QUIRE_URL", "http://localhost:8000")
GAUGES = ("quire:num_requests_running", "quire:num_requests_waiting", "quire:kv_cache_usage_perc")


def main() -> None:
    with urllib.request.urlopen(f"{URL}/metrics") as reply:
        families = text_string_to_metric_families(reply.read().decode())
        samples = [sample for family in families for sample in family.samples]
    totals = {name: sum(one.value for one in samples if one.name == name) for name in GAUGES}
    for name, value in totals.items():
        print(f"{name} {value:g}")
    first = "quire:time_to_first_token_seconds"
    seconds = sum(one.value for one in samples if one.name == f"{first}_sum")
    count = sum(one.value for one in samples if one.name == f"{first}_count")
    print(f"mean time to first token {1000 * seconds / count:.1f} ms" if count else "no request yet")


if __name__ == "__main__":
    main()
