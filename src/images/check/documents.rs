//! Documents about images. Authors of images write manifests, indexes and configurations, so only what is
//! needed of them is kept: a tree of values would need a hundred times the memory of a document.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The most layers of an image: the kernel mounts up to 500. Also the most manifests of an index.
pub(super) const MAX_LAYERS: usize = 512;

/// A manifest or an index of manifests.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Document {
    pub(super) config: Descriptor,
    pub(super) layers: First<Descriptor>,
    pub(super) manifests: First<Descriptor>,
}

/// What a document says about a blob.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Descriptor {
    pub(super) digest: String,
}

/// What containerd tells about an image.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Info {
    #[serde(rename = "chainID")]
    pub(super) chain_id: String,
    #[serde(rename = "imageSpec")]
    pub(super) image_spec: Config,
}

/// The configuration of an image.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Config {
    pub(super) rootfs: RootFs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RootFs {
    pub(super) diff_ids: First<String>,
}

/// An image in the list of CRI-O.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StoredImage {
    pub(super) id: Option<String>,
    pub(super) layer: Option<String>,
}

/// A layer in the list of CRI-O.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct StoredLayer {
    pub(super) id: Option<String>,
    pub(super) parent: Option<String>,
    pub(super) diff_digest: Option<String>,
    pub(super) compressed_diff_digest: Option<String>,
}

/// The first [`MAX_LAYERS`] items of a list. `null` is a list without items.
#[derive(Debug)]
pub(super) struct First<T> {
    pub(super) first: Vec<T>,
    pub(super) has_more: bool,
}

impl<T> Default for First<T> {
    fn default() -> Self {
        First { first: Vec::new(), has_more: false }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for First<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Items<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
            type Value = First<T>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a list")
            }

            fn visit_unit<E>(self) -> Result<First<T>, E> {
                Ok(First::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<First<T>, A::Error> {
                let mut list = First::default();
                while list.first.len() < MAX_LAYERS {
                    let Some(item) = items.next_element()? else { return Ok(list) };
                    list.first.push(item);
                }
                while items.next_element::<IgnoredAny>()?.is_some() {
                    list.has_more = true;
                }
                Ok(list)
            }
        }
        from.deserialize_any(Items(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_items_of_a_list_are_stored() {
        let list = |count: usize| format!("[{}]", vec!["{}"; count].join(","));
        for (count, stored, more) in
            [(0, 0, false), (512, 512, false), (513, 512, true), (100_000, 512, true)]
        {
            let text = format!(r#"{{"layers": {}, "x": {}}}"#, list(count), list(count));
            let document: Document = serde_json::from_str(&text).unwrap();
            assert_eq!((document.layers.first.len(), document.layers.has_more), (stored, more));
        }
    }

    #[test]
    fn documents_without_lists_are_read_and_those_of_other_types_are_refused() {
        for text in ["{}", r#"{"layers": null, "manifests": []}"#] {
            let document: Document = serde_json::from_str(text).unwrap();
            assert!(document.layers.first.is_empty() && document.config.digest.is_empty());
        }
        for text in ["7", r#"{"layers": 1}"#, r#"{"layers": [{"digest": 7}]}"#] {
            assert!(serde_json::from_str::<Document>(text).is_err(), "{text}");
        }
    }
}
