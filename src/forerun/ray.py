"""The server as a Ray Serve application, for config files and for programs: see docs/cluster.md.

from ray import serve
from forerun.ray import app

serve.run(app({"model": "smollm2", "replicas": 2}), route_prefix="/")
"""

from forerun.server.cluster.run import app, config_of
from forerun.server.settings import ClusterSettings

__all__ = ["ClusterSettings", "app", "config_of"]
