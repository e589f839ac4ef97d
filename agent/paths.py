"""Paths of Istio's image, relative to the working directory.

Source: istio/istio: pkg/config/constants/constants.go, pkg/security/security.go.
"""

MESH_CONFIG = "./etc/istio/config/mesh"
CONFIG_DIR = "./etc/istio/proxy"
POD_LABELS = "./etc/istio/pod/labels"
POD_ANNOTATIONS = "./etc/istio/pod/annotations"
ENVOY_BINARY = "/usr/local/bin/envoy"
BOOTSTRAP_TEMPLATE = "./var/lib/istio/envoy/envoy_bootstrap_tmpl.json"
WORKLOAD_SOCKET_DIR = "./var/run/secrets/workload-spiffe-uds"
CREDENTIAL_SOCKET = "./var/run/secrets/credential-uds/socket"
CREDENTIAL_FILES_SOCKET = "./var/run/secrets/credential-uds/files-socket"
WORKLOAD_CREDENTIALS_DIR = "./var/run/secrets/workload-spiffe-credentials"
TOKEN = "./var/run/secrets/tokens/istio-token"
ISTIOD_ROOT_CERT = "./var/run/secrets/istio/root-cert.pem"
CERTS_DIR = "./etc/certs"
CRL = "/var/run/secrets/istio/crl/ca-crl.pem"
ROOT_RESOLV_CONF = "/var/lib/istio/resolv.conf"
RESOLV_CONF = "/etc/resolv.conf"
