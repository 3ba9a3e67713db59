// What a gRPC library registers when it starts; here, what a client and a server on a Unix
// socket or a TCP address use. Replaces grpc_plugin_registry.cc of gRPC 1.56 in its build
// (client.cmake): no name resolution, no load balancing beyond "pick_first", no proxies.
#include "src/core/lib/config/core_configuration.h"
#include "src/core/ext/filters/client_channel/lb_policy/outlier_detection/outlier_detection.h"
#include "src/core/lib/surface/builtins.h"
#include "src/core/lib/transport/tcp_connect_handshaker.h"

namespace grpc_event_engine {
namespace experimental {
void RegisterEventEngineChannelArgPreconditioning(grpc_core::CoreConfiguration::Builder* builder);
}
}

// init.cc calls these two whatever is registered.
void grpc_resolver_dns_ares_init() {}
void grpc_resolver_dns_ares_shutdown() {}

namespace grpc_core {

using Builder = CoreConfiguration::Builder;

void BuildClientChannelConfiguration(Builder* builder);
void RegisterChannelIdleFilters(Builder* builder);
void RegisterClientAuthorityFilter(Builder* builder);
void RegisterDeadlineFilter(Builder* builder);
void RegisterHttpFilters(Builder* builder);
void RegisterMessageSizeFilter(Builder* builder);
void RegisterPickFirstLbPolicy(Builder* builder);
void RegisterResourceQuota(Builder* builder);
void RegisterSecurityFilters(Builder* builder);
void RegisterSockaddrResolver(Builder* builder);
void SecurityRegisterHandshakerFactories(Builder* builder);

// pick_first compares with this name; the policy it belongs to is not built.
const char* DisableOutlierDetectionAttribute::kName = "disable_outlier_detection";

void BuildCoreConfiguration(Builder* builder) {
  grpc_event_engine::experimental::RegisterEventEngineChannelArgPreconditioning(builder);
  RegisterTCPConnectHandshaker(builder);
  RegisterPickFirstLbPolicy(builder);
  BuildClientChannelConfiguration(builder);
  SecurityRegisterHandshakerFactories(builder);
  RegisterClientAuthorityFilter(builder);
  RegisterChannelIdleFilters(builder);
  RegisterHttpFilters(builder);
  RegisterDeadlineFilter(builder);
  RegisterMessageSizeFilter(builder);
  RegisterResourceQuota(builder);
  RegisterSockaddrResolver(builder);
  RegisterSecurityFilters(builder);
  RegisterBuiltins(builder);
}

}  // namespace grpc_core
