# Included by CMake after project(grpc), see toolchain.cmake.
cmake_minimum_required(VERSION 3.19)

set(_coracle_directory "${CMAKE_CURRENT_LIST_DIR}")

# Sources of grpc_unsecure and upb that nothing needs with registry.cc. A file too many here is
# an error of the linker.
set(_coracle_unused
  src/core/ext/filters/backend_metrics/
  src/core/ext/filters/census/
  src/core/ext/filters/client_channel/config_selector
  src/core/ext/filters/client_channel/http_proxy
  src/core/ext/filters/client_channel/lb_policy/address_filtering
  src/core/ext/filters/client_channel/lb_policy/grpclb/
  src/core/ext/filters/client_channel/lb_policy/oob_backend_metric
  src/core/ext/filters/client_channel/lb_policy/outlier_detection/
  src/core/ext/filters/client_channel/lb_policy/priority/
  src/core/ext/filters/client_channel/lb_policy/rls/
  src/core/ext/filters/client_channel/lb_policy/round_robin/
  src/core/ext/filters/client_channel/lb_policy/weighted_
  src/core/ext/filters/client_channel/resolver/binder/
  src/core/ext/filters/client_channel/resolver/dns/
  src/core/ext/filters/client_channel/resolver/fake/
  src/core/ext/filters/client_channel/resolver/polling_resolver
  src/core/ext/filters/client_channel/service_config_channel_arg_filter
  src/core/ext/filters/fault_injection/
  src/core/ext/transport/inproc/
  src/core/ext/upb-generated/google/api/
  src/core/ext/upb-generated/google/protobuf/descriptor
  src/core/ext/upb-generated/src/proto/grpc/gcp/
  src/core/ext/upb-generated/src/proto/grpc/lb/
  src/core/ext/upb-generated/src/proto/grpc/lookup/
  src/core/ext/upb-generated/validate/
  src/core/ext/upb-generated/xds/service/
  src/core/ext/upbdefs-generated/
  src/core/lib/event_engine/cf_engine/
  src/core/lib/event_engine/windows/
  src/core/lib/http/format_request
  src/core/lib/http/httpcli
  src/core/lib/security/credentials/alts/
  src/core/lib/security/credentials/fake/
  src/core/lib/security/credentials/plugin/
  src/core/lib/security/security_connector/fake/
  src/core/lib/transport/http_connect_handshaker
  src/core/plugin_registry/
  src/core/tsi/alts/
  src/core/tsi/fake_transport_security
  third_party/upb/upb/json/
  third_party/upb/upb/lex/
  third_party/upb/upb/reflection/
  third_party/upb/upb/text/
)

# Sources that cannot share a translation unit: names of theirs are others' too.
set(_coracle_alone
  bin_encoder
  ev_poll_posix
  ev_posix
  numbers
  time/time
  time_zone_posix
)

# Compiles the C++ sources of <target> some sixteen at a time: their headers are most of the work.
function(coracle_together target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  get_target_property(sources ${target} SOURCES)
  list(JOIN _coracle_alone "|" alone)
  list(FILTER sources INCLUDE REGEX "(\\.c|/(${alone})\\.cc)$")
  set_source_files_properties(${sources} TARGET_DIRECTORY ${target}
    PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

include("${_coracle_directory}/edit.cmake")

# Makes the library's timers sleep. An agent at rest has no timer of the library, but each of its two
# lists of timers is in parts, two per processor, and each part wakes a thread once per window, a second
# at most, to see whether a later timer is now in the window. With one part per list and a window of
# 30 s, each list wakes a thread every 30 s. A timer in the window is sorted in at once, so none is late.
# A request to the runtime has two minutes, so it stays outside the window and wakes no thread.
# The third timer reads connections every 5 s for programs that wait in no queue; the thread "grpc-0"
# always does. The variable GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS still turns it on.
function(coracle_quiet)
  coracle_edit(grpc_unsecure src/core/lib/iomgr/timer_generic.cc
    "#define MIN_QUEUE_WINDOW_DURATION 0.01" "#define MIN_QUEUE_WINDOW_DURATION 30.0"
    "#define MAX_QUEUE_WINDOW_DURATION 1.0" "#define MAX_QUEUE_WINDOW_DURATION 30.0"
    "grpc_core::Clamp(2 * gpr_cpu_num_cores(), 1u, 32u)" "1")
  coracle_edit(grpc_unsecure src/core/lib/event_engine/posix_engine/timer.cc
    "kMinQueueWindowDuration = 0.01" "kMinQueueWindowDuration = 30.0"
    "kMaxQueueWindowDuration = 1.0" "kMaxQueueWindowDuration = 30.0"
    "grpc_core::Clamp(2 * gpr_cpu_num_cores(), 1u, 32u)" "1")
  coracle_edit(gpr src/core/lib/config/config_vars.cc
    "overrides.client_channel_backup_poll_interval_ms, 5000)"
    "overrides.client_channel_backup_poll_interval_ms, 0)")
endfunction()

function(coracle_client)
  # Archives that cargo's build script names, with nothing in them.
  file(WRITE "${CMAKE_BINARY_DIR}/empty.c" "")
  add_library(empty OBJECT "${CMAKE_BINARY_DIR}/empty.c")
  foreach(library cares re2)
    add_library(${library} STATIC $<TARGET_OBJECTS:empty>)
    add_dependencies(grpc_unsecure ${library})
  endforeach()

  list(JOIN _coracle_unused "|" unused)
  foreach(target grpc_unsecure upb)
    get_target_property(sources ${target} SOURCES)
    list(FILTER sources EXCLUDE REGEX "^(${unused})")
    set_target_properties(${target} PROPERTIES SOURCES "${sources}")
  endforeach()
  target_sources(grpc_unsecure PRIVATE "${_coracle_directory}/registry.cc")

  # Without the switch in this header the trace flags are constants, and the code that prints traces
  # is left out. A directory that comes first has the copy; its text is that of the original.
  set(header src/core/lib/debug/trace.h)
  get_target_property(root grpc_unsecure SOURCE_DIR)
  file(READ "${root}/${header}" text)
  string(REGEX REPLACE "\n#define GRPC_USE_TRACERS[^\n]*" "" without "${text}")
  if(without STREQUAL text)
    message(FATAL_ERROR "${header} has no switch for traces")
  endif()
  file(WRITE "${CMAKE_BINARY_DIR}/first/${header}" "${without}")
  target_include_directories(grpc_unsecure BEFORE PRIVATE "${CMAKE_BINARY_DIR}/first")

  coracle_quiet()

  # Abseil is a hundred archives of a file or two: all in one.
  get_target_property(abseil base SOURCE_DIR)
  get_filename_component(abseil "${abseil}" DIRECTORY)
  get_property(directories DIRECTORY "${abseil}" PROPERTY SUBDIRECTORIES)
  foreach(directory IN LISTS directories)
    get_property(targets DIRECTORY "${directory}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
      get_target_property(type ${target} TYPE)
      # Those have compiler flags of their own.
      if(NOT type STREQUAL STATIC_LIBRARY OR target STREQUAL base OR target MATCHES hwaes)
        continue()
      endif()
      get_target_property(sources ${target} SOURCES)
      list(FILTER sources INCLUDE REGEX "\\.cc$")
      list(TRANSFORM sources PREPEND "${directory}/")
      target_sources(base PRIVATE ${sources})
      set_target_properties(${target} PROPERTIES SOURCES $<TARGET_OBJECTS:empty>)
    endforeach()
  endforeach()

  coracle_together(grpc_unsecure)
  coracle_together(gpr)
  coracle_together(base)
endfunction()

cmake_language(DEFER CALL coracle_client)
