//! Changes of single existing containers: resize and removal.

use std::collections::BTreeMap;

use crate::cri::{CriError, ErrorClass};
use crate::model::api::Container;
use crate::model::ids::{ContainerId, SandboxId};
use crate::model::pod::Pod;
use crate::transport::generated::runtime::LinuxContainerResources;
use crate::transport::grpc::Kind;
use crate::util::stop::StopToken;

use super::client::Runtime;
use super::linux_resources::{self, MEMORY_HIGH, NO_LIMIT};
use super::sandbox_config::overhead;
use super::settings::Settings;

/// The resources of a pod as a whole, without its overhead, that the runtime receives in a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PodNumbers {
    /// CPU weight in the scale of cgroup v1.
    pub cpu_shares: Option<u64>,
    /// Microseconds of CPU time per period (-1: no limit), and the period.
    pub cpu_quota: Option<(i64, u64)>,
    /// Bytes; -1: no limit.
    pub memory_bytes: Option<i64>,
    /// Bytes of `memory.min`.
    pub memory_min: Option<i64>,
    /// Bytes of `memory.low`.
    pub memory_low: Option<i64>,
    /// Bytes of `memory.high`; -1: no limit.
    pub memory_high: Option<i64>,
}

impl PodNumbers {
    /// The files of version 2 that protect and throttle the memory of the pod.
    fn unified(&self) -> BTreeMap<String, String> {
        let text = |bytes: i64| if bytes < 0 { NO_LIMIT.to_owned() } else { bytes.to_string() };
        [("memory.min", self.memory_min), ("memory.low", self.memory_low), (MEMORY_HIGH, self.memory_high)]
            .into_iter()
            .filter_map(|(file, bytes)| Some((file.to_owned(), text(bytes?))))
            .collect()
    }
}

impl Runtime {
    /// Removes the record of a container; its log files stay. A container that does not exist is no
    /// error.
    ///
    /// # Errors
    /// When the runtime did not remove it.
    pub fn remove_container(&self, id: &ContainerId, stop: &StopToken) -> Result<(), CriError> {
        match self.shared.cri.with_stop(stop.clone()).remove_container(id) {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// The bytes of memory that a container uses, if the runtime reports them.
    ///
    /// # Errors
    /// When the call fails.
    pub fn memory_used(&self, id: &ContainerId, stop: &StopToken) -> Result<Option<i64>, CriError> {
        let used = self.shared.cri.with_stop(stop.clone()).memory_used(id)?;
        Ok(used.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)))
    }

    /// Binds a running container to these CPUs, such as `0-3,8`. `false`: there is no such container.
    ///
    /// # Errors
    /// When the runtime did not apply it.
    pub fn set_cpus(&self, id: &ContainerId, cpus: &str, stop: &StopToken) -> Result<bool, CriError> {
        let resources =
            LinuxContainerResources { cpuset_cpus: cpus.to_owned(), ..LinuxContainerResources::default() };
        match self.shared.cri.with_stop(stop.clone()).update_container_resources(id, resources) {
            Err(error) if error.is_not_found() => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Reports the resources that a running pod gets, before its cgroup has them. It is no error if the
    /// runtime does not offer the call (containerd 2.2 reports that with an error of kind Unknown).
    ///
    /// # Errors
    /// When the runtime refuses.
    pub fn report_pod_resize(
        &self,
        pod: &Pod,
        sandbox: &SandboxId,
        numbers: PodNumbers,
        stop: &StopToken,
    ) -> Result<(), CriError> {
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let (cpu_quota, cpu_period) = numbers.cpu_quota.unwrap_or_default();
        let resources = LinuxContainerResources {
            cpu_shares: numbers.cpu_shares.map_or(0, number),
            cpu_quota,
            cpu_period: number(cpu_period),
            memory_limit_in_bytes: numbers.memory_bytes.unwrap_or_default(),
            unified: numbers.unified(),
            ..LinuxContainerResources::default()
        };
        let overhead = overhead(pod, &self.shared.settings);
        match self.shared.cri.with_stop(stop.clone()).update_sandbox_resources(sandbox, overhead, resources) {
            Err(error) if error.class() == ErrorClass::Unsupported => Ok(()),
            Err(error) if error.kind() == Some(Kind::Unknown) && error.desc().contains("not implemented") => {
                Ok(())
            }
            result => result,
        }
    }

    /// Gives a running container the memory, or else the CPU, that `container` grants, without
    /// a restart.
    ///
    /// # Errors
    /// When the runtime did not apply it.
    pub fn resize_container(
        &self,
        pod: &Pod,
        container: &Container,
        id: &ContainerId,
        memory: bool,
        stop: &StopToken,
    ) -> Result<(), CriError> {
        let resources = resized(pod, container, memory, &self.shared.settings);
        self.shared.cri.with_stop(stop.clone()).update_container_resources(id, resources)
    }
}

/// The fields of a request that changes a container's memory, or else its CPU. The runtime does not
/// change fields that are zero.
fn resized(pod: &Pod, container: &Container, memory: bool, settings: &Settings) -> LinuxContainerResources {
    let all = linux_resources::container_resources(pod, container, settings);
    if !memory {
        // Without the gate `MemoryQoS`, each resize removes the throttling.
        let unthrottled = |(file, text): &(String, String)| file == MEMORY_HIGH && text == NO_LIMIT;
        return LinuxContainerResources {
            cpu_shares: all.cpu_shares,
            // -1 removes the limit; 0 would keep the old one.
            cpu_quota: if all.cpu_period > 0 && all.cpu_quota == 0 { -1 } else { all.cpu_quota },
            cpu_period: all.cpu_period,
            unified: all.unified.into_iter().filter(unthrottled).collect(),
            ..LinuxContainerResources::default()
        };
    }
    let mut unified = all.unified;
    if settings.memory_qos.is_some() {
        // DIFFERS: upstream keeps the throttling of the smaller limit if the new values have none.
        unified.entry(MEMORY_HIGH.to_owned()).or_insert_with(|| NO_LIMIT.to_owned());
    }
    LinuxContainerResources {
        memory_limit_in_bytes: all.memory_limit_in_bytes,
        memory_swap_limit_in_bytes: all.memory_swap_limit_in_bytes,
        unified,
        ..LinuxContainerResources::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::container_memory::{
        MemoryReservationPolicy, ProtectionSettings, SwapBehavior, Throttling,
    };
    use serde_json::{Value, json};

    fn memory_files(resources: Value, settings: &Settings) -> Vec<(String, String)> {
        let object = json!({"spec": {"containers": [{"name": "c", "resources": resources}]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        let resized_with = |memory| resized(&pod, &pod.containers()[0], memory, settings);
        let unthrottled = settings.memory_qos.is_none() && settings.machine.cgroup_v2;
        let of_cpu: Vec<(String, String)> = resized_with(false).unified.into_iter().collect();
        let expected = unthrottled.then(|| ("memory.high".to_owned(), "max".to_owned()));
        assert_eq!(of_cpu, expected.into_iter().collect::<Vec<_>>());
        resized_with(true).unified.into_iter().collect()
    }

    #[test]
    fn runtime_receives_the_protection_and_throttling_of_a_resized_pod() {
        let files = |numbers: PodNumbers| numbers.unified().into_iter().collect::<Vec<_>>();
        assert!(files(PodNumbers::default()).is_empty());
        let numbers = PodNumbers {
            memory_min: None,
            memory_low: Some(4096),
            memory_high: Some(-1),
            ..PodNumbers::default()
        };
        let texts = [("memory.high", "max"), ("memory.low", "4096")];
        assert_eq!(files(numbers), texts.map(|(file, text)| (file.to_owned(), text.to_owned())));
    }

    #[test]
    fn resize_of_memory_changes_swap_protection_and_throttling() {
        let mut settings = super::super::tests::settings();
        settings.machine.cgroup_v2 = true;
        settings.machine.memory_capacity_bytes = 1000 << 20;
        settings.machine.swap_capacity_bytes = 500 << 20;
        settings.single_process_oom_kill = Some(true);
        settings.swap = SwapBehavior::LimitedSwap;
        settings.memory_qos = Some(ProtectionSettings {
            reservation_policy: MemoryReservationPolicy::Tiered,
            throttling: Some(Throttling { factor: 0.5, page_bytes: 4096 }),
            allocatable_memory: 1000 << 20,
        });
        let expect = |files: &[(&str, &str)]| -> Vec<(String, String)> {
            files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect()
        };
        let bytes = |mebibytes: i64| (mebibytes << 20).to_string();
        let burstable = json!({"requests": {"memory": "100Mi"}, "limits": {"memory": "200Mi"}});
        assert_eq!(
            memory_files(burstable, &settings),
            expect(&[
                ("memory.high", bytes(150).as_str()),
                ("memory.low", bytes(100).as_str()),
                ("memory.swap.max", bytes(50).as_str()),
            ])
        );
        // Its request is its limit now.
        let even = json!({"requests": {"memory": "200Mi"}, "limits": {"memory": "200Mi"}});
        assert_eq!(
            memory_files(even, &settings),
            expect(&[("memory.high", "max"), ("memory.low", bytes(200).as_str()), ("memory.swap.max", "0")])
        );
        // Without the gate nothing is throttled any more.
        settings.memory_qos = None;
        let burstable = json!({"requests": {"memory": "100Mi"}, "limits": {"memory": "200Mi"}});
        assert_eq!(
            memory_files(burstable, &settings),
            expect(&[("memory.high", "max"), ("memory.swap.max", bytes(50).as_str())])
        );
        settings.machine.cgroup_v2 = false;
        let burstable = json!({"requests": {"memory": "100Mi"}, "limits": {"memory": "200Mi"}});
        assert!(memory_files(burstable, &settings).is_empty());
    }
}
