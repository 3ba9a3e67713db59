//! The users that own the files of Secret, configMap, downwardAPI and projected volumes, as far as the pod
//! names them (Go: pkg/volume/util/atomic_writer.go, `ResolvesFsUser`).

/// The owners of the files of one volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FileOwners {
    /// The feature gate `AtomicWriteVolumeUserFields`. Without it the fields have no effect.
    has_fields: bool,
    /// `defaultUser` of the volume.
    by_default: Option<i64>,
}

impl FileOwners {
    /// `has_fields`: the feature gate `AtomicWriteVolumeUserFields`. `by_default`: `defaultUser` of the
    /// volume.
    pub(super) fn new(has_fields: bool, by_default: Option<i64>) -> FileOwners {
        FileOwners { has_fields, by_default }
    }

    /// The owner of a file with this field `user`; `None`: the pod names none. The API permits no number
    /// that is not one of a user.
    pub(super) fn owner(self, user: Option<i64>) -> Option<u32> {
        user_id(user.or(self.by_default).filter(|_| self.has_fields)?)
    }
}

/// The number as that of a user; `None`: it is none. The largest of 32 bits means no user to the kernel.
pub(super) fn user_id(number: i64) -> Option<u32> {
    u32::try_from(number).ok().filter(|user| *user != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_of_the_file_precedes_that_of_the_volume() {
        for (has_fields, by_default, user, expected) in [
            (true, None, None, None),
            (true, Some(5), None, Some(5)),
            (true, Some(5), Some(0), Some(0)),
            (true, None, Some(7), Some(7)),
            (true, Some(5), Some(-1), None),
            (true, None, Some(1 << 40), None),
            (true, None, Some(i64::from(u32::MAX) - 1), Some(u32::MAX - 1)),
            (true, None, Some(i64::from(u32::MAX)), None),
            (false, Some(5), Some(7), None),
        ] {
            assert_eq!(FileOwners::new(has_fields, by_default).owner(user), expected);
        }
    }
}
