"""A Ray cluster of two nodes on this machine, with one core each: `python ray_cluster.py [FOLDER OF OTHER SOURCES]`.

The second node takes its packages from that folder, if one is given. Prints "ready ADDRESS"; "kill" on standard input kills
the second node without notice, and the end of the input ends all.
"""

import os
import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}

cluster = Cluster(initialize_head=True, head_node_args=SMALL | {"include_dashboard": False})
if len(sys.argv) > 1:
    os.environ["PYTHONPATH"] = sys.argv[1]
second = cluster.add_node(**SMALL)
cluster.wait_for_nodes()
print(f"ready {cluster.address}", flush=True)
for line in sys.stdin:
    if line.strip() == "kill":
        cluster.remove_node(second, allow_graceful=False)
        print("killed", flush=True)
cluster.shutdown()
