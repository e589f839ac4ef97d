# One image for everything that runs in a container: init, agent with Envoy, discovery, cluster DNS, the echo app, the
# prober and the tests. BASE_IMAGE is any Debian 12/13 or Ubuntu 24.04; scripts/build-image makes one where none can be
# pulled. Builds with and without BuildKit.
ARG BASE_IMAGE=debian:12-slim

FROM ${BASE_IMAGE} AS packages
COPY certificates/ /usr/local/share/ca-certificates/
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    ca-certificates python3 python3-venv python3-dev gcc libc6-dev \
 && update-ca-certificates
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements-build.lock requirements-run.lock ./
# python-iptables comes as source only: its build tool is pinned too, so no build isolation.
RUN python3 -m venv /opt/sidecarlab \
 && /opt/sidecarlab/bin/pip install -q --require-hashes -r requirements-build.lock \
 && /opt/sidecarlab/bin/pip install -q --require-hashes --no-build-isolation --use-pep517 -r requirements-run.lock

FROM packages AS code
COPY pyproject.toml LICENSE README.m[d] ./
COPY agent agent
COPY init init
COPY lab lab
RUN /opt/sidecarlab/bin/pip install -q --no-deps --no-build-isolation --target /opt/code .

FROM packages AS installed
RUN /opt/sidecarlab/bin/pip uninstall -q -y setuptools pip

FROM ${BASE_IMAGE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 iptables nftables \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc /usr/share/man
COPY --from=installed /opt/sidecarlab /opt/sidecarlab
COPY --from=code /opt/code /opt/code
COPY scripts/healthy /usr/local/bin/healthy
ENV PATH=/opt/code/bin:/opt/sidecarlab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/code PYTHONUNBUFFERED=1 LANG=C.UTF-8
USER 1000:1000
CMD ["lab", "--help"]
