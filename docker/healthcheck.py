"""Exit status 0 when the server in this container is healthy: the HEALTHCHECK of all images.

HEALTH_URL says where to ask; set it together with another --port. A proxy that the container was given is not used.
"""

import os
import sys
import urllib.error
import urllib.request


def main() -> int:
    url = os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/health")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=8) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, urllib.error.URLError) as error:
        print(f"{url}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
