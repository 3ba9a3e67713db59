package main

import "k8s.io/apimachinery/pkg/api/resource"

// What a quantity is; OK is false where it is none.
type amount struct {
	OK    bool   `json:"ok"`
	Units int64  `json:"units"`
	Milli int64  `json:"milli"`
	Text  string `json:"text"`
	// Whether the numbers are what they seem: an int64 holds them.
	Fits bool `json:"fits"`
}

func quantity(request question) any {
	parsed, err := resource.ParseQuantity(request.Text)
	if err != nil {
		return amount{}
	}
	read := amount{OK: true, Text: parsed.String(), Units: parsed.Value(), Milli: parsed.MilliValue()}
	most := resource.NewMilliQuantity(1<<63-1, resource.DecimalSI)
	least := resource.NewMilliQuantity(-1<<63, resource.DecimalSI)
	read.Fits = parsed.Cmp(*most) <= 0 && parsed.Cmp(*least) >= 0
	return read
}
