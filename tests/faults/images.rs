//! The part of the fault matrix that belongs to the image garbage collector: called
//! directly, because that of the agent makes its first round after five minutes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use coracle::cri;
use coracle::images::{GcPolicy, ImageCollector};
use coracle::model::event::EventSink;
use coracle::model::ids::ImageRef;
use coracle::transport::grpc::Kind;
use coracle::util::stop::{self, StopToken};
use jiff::{SignedDuration, Timestamp};

use crate::in_parallel;
use crate::method_faults::{FAULTS, Fault, passed};
use crate::support::fake_cri::{BUSYBOX_ID, FakeCri, Wire};
use crate::support::fake_node::LONG;
use crate::support::wait::wait_until;

/// Methods that only the collector calls.
pub(crate) const METHODS: &[&str] = &["ImageFsInfo", "RemoveImage"];

/// Shorter than the agent's two minutes, so that a hanging call ends in the test.
const CALL: Duration = Duration::from_secs(3);

fn run(fault: Fault, method: &'static str) {
    let fake = FakeCri::start();
    for name in ["registry.example/a:1", "registry.example/ab:1", "registry.example/abc:1"] {
        fake.add_image(name);
    }
    let wire = Wire::start(&fake.socket());
    let settings =
        cri::Settings { runtime_endpoint: wire.endpoint(), image_endpoint: None, request_timeout: CALL };
    let (_, images) = cri::connect(settings).unwrap();
    let (events, _queue) = EventSink::new();
    let policy =
        GcPolicy { high_percent: 100, max_age: Some(Duration::from_secs(60)), ..GcPolicy::default() };
    let begun = Timestamp::now();
    let mut collector = ImageCollector::new(images, policy, events, begun);
    let in_use: BTreeSet<ImageRef> = [ImageRef::from(BUSYBOX_ID.to_owned())].into();
    let never = StopToken::never();
    // It records the images; none has been unused for long. A busy machine may take longer
    // than a call may.
    wait_until("the images to be known", LONG, || collector.collect(&in_use, begun, &never).is_ok());
    let later = begun.checked_add(SignedDuration::from_secs(120)).unwrap();
    let mut gate = None;
    match fault {
        Fault::FailsThrice => fake.fail_times(method, 3, Kind::Unknown, "it failed"),
        Fault::IsAway => fake.fail(method, Kind::Unavailable, "it is away"),
        Fault::IsSlow => fake.delay(method, Duration::from_millis(200)),
        Fault::LosesResponse => fake.lose_responses(method, 1),
        Fault::Hangs | Fault::IsCut | Fault::IsGarbled => gate = Some(fake.hang_next(method)),
    }
    let longest = std::thread::scope(|scope| {
        let rounds = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            // On a busy machine an earlier call may take longer than it may, and the round ends
            // before the call with the fault.
            wait_until("the fault to apply to a round", LONG, || {
                let begun = Instant::now();
                // Whether it succeeds depends on the fault; it must end.
                let _ = collector.collect(&in_use, later, &never);
                longest = longest.max(begun.elapsed());
                gate.as_ref().is_none_or(|gate| gate.waiting() > 0)
            });
            longest
        });
        if let Some(gate) = &gate {
            wait_until(&format!("{method} to be called"), LONG, || gate.waiting() > 0);
            match fault {
                Fault::IsCut => wire.cut(),
                Fault::IsGarbled => wire.send_random_bytes(),
                _ => {}
            }
        }
        rounds.join().unwrap()
    });
    assert!(longest < LONG, "a round took {longest:?}");
    fake.behave(method);
    gate.iter().for_each(|gate| gate.open());
    // The next rounds remove unused images, and nothing else.
    wait_until("the unused images to be gone", LONG, || {
        let _ = collector.collect(&in_use, later, &never);
        fake.with_state(|state| state.images.keys().eq([BUSYBOX_ID]))
    });
}

#[test]
fn image_garbage_collection_survives_faults_of_every_method() {
    let cases: Vec<(Fault, &'static str)> =
        FAULTS.iter().flat_map(|fault| METHODS.iter().map(|method| (*fault, *method))).collect();
    in_parallel(&cases, |(fault, method)| run(*fault, method));
    passed(cases.len());
}

/// A round in the middle of a hanging call ends with the agent.
#[test]
fn stop_ends_a_hanging_image_garbage_collection() {
    in_parallel(&["ListImages", "ImageFsInfo", "RemoveImage"], |method| {
        let fake = FakeCri::start();
        fake.add_image("registry.example/a:1");
        let (source, token) = stop::pair();
        let (_, images) = fake.connect();
        let (events, _queue) = EventSink::new();
        let policy =
            GcPolicy { high_percent: 100, max_age: Some(Duration::from_secs(60)), ..GcPolicy::default() };
        let begun = Timestamp::now();
        let mut collector = ImageCollector::new(images.with_stop(token.clone()), policy, events, begun);
        let in_use = BTreeSet::new();
        collector.collect(&in_use, begun, &token).unwrap();
        let gate = fake.hang(method);
        let later = begun.checked_add(SignedDuration::from_secs(120)).unwrap();
        std::thread::scope(|scope| {
            let round = scope.spawn(|| {
                let _ = collector.collect(&in_use, later, &token);
            });
            wait_until(&format!("{method} to hang"), LONG, || gate.waiting() > 0);
            drop(source);
            // By itself a call ends after two minutes.
            wait_until("the round to end", Duration::from_secs(100), || round.is_finished());
        });
    });
}
